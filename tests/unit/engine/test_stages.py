"""One model in stages, real processes over gloo: to the bit what one stage answers, and that is what transformers
answers."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.native.linear import best_variant
from tests.lora_adapters import write_adapter
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.toy_scheduler import random_prompts
from tests.transformers_models import generated, write_any_model
from tests.unit.engine.rank_process import TIMEOUT_S, rank_case, rank_processes, run_ranks
from tests.unit.engine.test_fake import answer_on_paper

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


ADAPTED = "adapter"
ALL = (*EXACT, *SETTINGS, ADAPTED)
QUICK = ("llama", "bfloat16", "experts", "int8 cache", ADAPTED)
OF_TRANSFORMERS = ("llama", "window", "norms behind", "parallel layers", "experts")


@pytest.fixture(scope="module")
def folders(written):
    models = EXACT | {name: (family, config) for name, (family, config, _) in SETTINGS.items()}
    return {name: written(write_any_model, family, **config) for name, (family, config) in models.items()}


@pytest.fixture(scope="module")
def adapter(folders, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapters") / "sql", folders["llama"], seed=5)


class Run(NamedTuple):
    """What rank 0 sampled in each case and what each rank says of itself, in stages and in one stage."""

    num_stages: int
    names: Sequence[str]
    sampled: dict
    facts: list
    whole: dict
    facts_of_whole: dict


@pytest.fixture(
    scope="module",
    params=[(2, QUICK), *(pytest.param((size, ALL), marks=pytest.mark.nightly) for size in (2, 3))],
    ids=["2, some", "2", "3"],
)
def staged(request, folders, adapter, tmp_path_factory):
    num_stages, names = request.param

    def run(num_stages):
        cases = {name: case_of(name, folders, adapter, num_stages) for name in names}
        return run_ranks(tmp_path_factory.mktemp("ranks"), num_stages, cases)

    whole, (facts_of_whole,) = run(1)
    return Run(num_stages, names, *run(num_stages), whole, facts_of_whole)


def case_of(name, folders, adapter, num_stages):
    if name == ADAPTED:
        return {**case(folders["llama"], num_stages, lora=[f"sql={adapter}"]), "adapters": ["", "sql", "sql", ""]}
    *_, settings = SETTINGS.get(name, [{}])
    return case(folders[name], num_stages, **settings)


def test_tokens_and_logprobs_are_to_the_bit_those_of_one_stage(staged, subtests):
    for name in staged.names:
        with subtests.test(name):
            facts = staged.facts_of_whole[name]
            if not has_kernels(name, facts):
                pytest.skip("without kernels bits depend on the sizes of steps, and micro-batches are others")
            assert staged.sampled[name] == staged.whole[name]
            if name == "llama":
                assert all(rank[name]["numerics"] == facts["numerics"] for rank in staged.facts)


def has_kernels(name, facts):
    """Return whether native kernels compute the products and the attention of a case."""
    has_products = name in ("int8 weights, tied", "w8a8") or best_variant(DTYPES.get(name, torch.float32)) is not None
    return has_products and (name == "int8 cache" or facts["description"]["attention"] == "native")


def check_tokens(answers, folder):
    """Up to where transformers ends an answer."""
    drafts = [[token["token_id"] for token in answer] for answer in answers]
    expected = generated(folder, PROMPTS, NUM_NEW_TOKENS, drafts)
    assert any(len(answer) == NUM_NEW_TOKENS for answer in expected)
    for answer, ids in zip(answers, expected, strict=True):
        assert [token["token_id"] for token in answer[: len(ids)]] == ids


def test_tokens_are_those_of_transformers(folders, staged):
    for name in {*OF_TRANSFORMERS} & {*staged.names}:
        check_tokens(staged.sampled[name], folders[name])


def test_no_rank_holds_more_than_its_stage(staged):
    """Three layers. What is tied is looked up in the first stage, and the head of the last."""
    whole = staged.facts_of_whole["llama"]
    ranks = [rank["llama"] for rank in staged.facts]
    num_layers = {2: [1, 2], 3: [1, 1, 1]}[staged.num_stages]
    assert [3 * rank["kv_pool_bytes"] for rank in ranks] == [whole["kv_pool_bytes"] * each for each in num_layers]
    assert sum(rank["weight_bytes"] for rank in ranks) == whole["weight_bytes"]
    assert max(rank["weight_bytes"] for rank in ranks) < 0.8 * whole["weight_bytes"]
    assert all(rank["fingerprint"] == whole["fingerprint"] for rank in ranks)
    assert {rank["num_blocks"] for rank in ranks} == {whole["num_blocks"]}
    assert all(rank["description"]["pp_size"] == str(staged.num_stages) for rank in ranks)


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


def test_what_one_stage_cannot_load_is_one_sentence_on_every_rank(copied, tmp_path):
    folder = copied(write_tiny_model)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "cases.json").write_text(json.dumps({"damaged": case(folder, 2)}))
    with rank_processes(2, "tests.unit.engine.rank_process", tmp_path, "cpu") as processes:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    for output in outputs:
        assert "ModelError: the weights lack model.layers.2.mlp.up_proj.weight\n" in output
