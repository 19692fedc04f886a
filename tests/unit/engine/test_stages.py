"""One model in stages, real processes over gloo: to the bit what one stage answers, and that is what transformers
answers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.native.dense_linear import best_variant
from tests.foreign_models import generated, write_any_model
from tests.lora_adapters import write_adapter
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.unit.engine.test_fake import answer_on_paper
from tests.unit.engine.test_llama import random_prompts
from tests.unit.serving_node.rank_process import TIMEOUT_S, rank_case, rank_processes, run_ranks

PROMPTS = random_prompts([1, 33, 150, 200])  # together they are several micro-batches
NUM_NEW_TOKENS = 6
EXACT = {  # kinds of layers, of what goes from stage to stage, and of settings
    "llama": ("llama", {}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16", "tie_word_embeddings": True, "head_dim": 16}),
    "window": ("mistral", {"sliding_window": 11}),
    "norms behind": ("olmo2", {}),
    "norms on both sides, tied": ("gemma2", {}),
    "parallel layers": ("cohere", {}),
    "experts": ("mixtral", {}),
}
DTYPES = {"bfloat16": torch.bfloat16}  # of the others float32
SETTINGS = {
    "int8 weights, tied": ("llama", {"tie_word_embeddings": True}, {"quantization": "int8"}),
    "w8a8": ("llama", {}, {"quantization": "w8a8"}),
    "int8 cache": ("llama", {}, {"kv_cache_dtype": "int8"}),
}


def case(folder, num_stages, prompts=PROMPTS, **settings):
    return rank_case(folder, prompts, NUM_NEW_TOKENS, 170, pipeline_parallel_size=num_stages, **settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    models = EXACT | {name: (family, config) for name, (family, config, _) in SETTINGS.items()}
    return {name: write_any_model(root / name, family, **config) for name, (family, config) in models.items()}


@pytest.fixture(scope="module")
def adapter(folders, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapters") / "sql", folders["llama"], seed=5)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.nightly)])
def num_stages(request):
    return request.param


def cases(folders, adapter, num_stages):
    found = {name: case(folder, num_stages) for name, folder in folders.items() if name in EXACT}
    found |= {name: case(folders[name], num_stages, **settings) for name, (*_, settings) in SETTINGS.items()}
    lora = {**case(folders["llama"], num_stages, lora=[f"sql={adapter}"]), "adapters": ["", "sql", "sql", ""]}
    return found | {"adapter": lora}


@pytest.fixture(scope="module")
def alone(folders, adapter, tmp_path_factory):
    """What each case gives on one rank, and what that says of itself."""
    return run_ranks(tmp_path_factory.mktemp("alone"), 1, cases(folders, adapter, 1))


@pytest.fixture(scope="module")
def staged(folders, adapter, num_stages, tmp_path_factory):
    """What rank 0 gives, and what each rank says of itself."""
    return run_ranks(tmp_path_factory.mktemp("staged"), num_stages, cases(folders, adapter, num_stages))


@pytest.mark.parametrize("name", [*EXACT, *SETTINGS, "adapter"])
def test_tokens_and_logprobs_are_to_the_bit_those_of_one_stage(name, alone, staged):
    (on_one,) = alone[1]
    has_products = name in ("int8 weights, tied", "w8a8") or best_variant(DTYPES.get(name, torch.float32)) is not None
    if not has_products or (name != "int8 cache" and on_one[name]["description"]["attention"] != "native"):
        pytest.skip("without kernels bits depend on the sizes of steps, and micro-batches are others")
    assert staged[0][name] == alone[0][name]
    if name == "llama":
        assert all(rank[name]["traits"] == on_one[name]["traits"] for rank in staged[1])


def check_tokens(answers, folder):
    """Up to where transformers ends an answer."""
    expected = generated(folder, PROMPTS, NUM_NEW_TOKENS)
    assert any(len(answer) == NUM_NEW_TOKENS for answer in expected)
    for answer, ids in zip(answers, expected, strict=True):
        assert [token["token_id"] for token in answer[: len(ids)]] == ids


@pytest.mark.parametrize("name", ["llama", "window", "norms behind", "parallel layers", "experts"])
def test_tokens_are_those_of_transformers(name, folders, staged):
    check_tokens(staged[0][name], folders[name])


def test_no_rank_holds_more_than_its_stage(num_stages, alone, staged):
    """Three layers. What is tied is looked up in the first stage, and the head of the last."""
    (whole,) = [rank["llama"] for rank in alone[1]]
    ranks = [rank["llama"] for rank in staged[1]]
    num_layers = {2: [1, 2], 3: [1, 1, 1]}[num_stages]
    assert [3 * rank["kv_pool_bytes"] for rank in ranks] == [whole["kv_pool_bytes"] * each for each in num_layers]
    assert sum(rank["weight_bytes"] for rank in ranks) == whole["weight_bytes"]
    assert max(rank["weight_bytes"] for rank in ranks) < 0.8 * whole["weight_bytes"]
    assert all(rank["fingerprint"] == whole["fingerprint"] for rank in ranks)
    assert {rank["num_blocks"] for rank in ranks} == {whole["num_blocks"]}
    assert all(rank["description"]["pp_size"] == str(num_stages) for rank in ranks)


@pytest.mark.nightly
def test_stages_of_two_ranks_answer_as_transformers_and_the_fake_model_as_on_paper(folders, tmp_path):
    fake = write_fake_model(tmp_path / "fake", num_kv_heads=3, num_layers=5)
    prompts = [[97, 98], list(range(30)), [255] * 9]
    given = {"llama": case(folders["llama"], 2), "fake": case(fake, 2, prompts, block_size=4)}
    sampled, facts = run_ranks(tmp_path, 4, given)
    check_tokens(sampled["llama"], folders["llama"])
    of_fake = [[token["token_id"] for token in answer] for answer in sampled["fake"]]
    assert of_fake == [answer_on_paper(prompt, NUM_NEW_TOKENS) for prompt in prompts]
    assert [rank["llama"]["num_kv_heads"] for rank in facts] == [1] * 4
    assert [rank["fake"]["num_kv_heads"] for rank in facts] == [1, 2] * 2


def test_what_one_stage_cannot_load_is_one_sentence_on_every_rank(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "cases.json").write_text(json.dumps({"damaged": case(folder, 2)}))
    with rank_processes(2, "tests.unit.serving_node.rank_process", tmp_path, "cpu") as processes:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    for output in outputs:
        assert "ModelError: the weights lack model.layers.2.mlp.up_proj.weight\n" in output
