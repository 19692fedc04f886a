"""Ranks that divide a step by tokens between the products of a layer, real processes over gloo: of two ranks, to the bit
what they answer undivided, and that is what transformers answers."""

import json

import pytest
import torch

from engine.engine import Engine
from engine.forward_batch import build_batch
from engine.model.residual import residual_of
from serving_core.errors import SettingsError
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from tests.foreign_models import generated, write_any_model, write_foreign_model
from tests.lora_adapters import write_adapter
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.unit.engine.test_llama import random_prompts
from tests.unit.serving_node.rank_process import TIMEOUT_S, rank_case, rank_processes, run_ranks

PROMPTS = random_prompts([*range(1, 14), 33, 150])
NUM_NEW_TOKENS = 4
FLAG = "--sequence-parallel-min-tokens"
MODELS = {  # kinds of layers, of what is between their products, and of settings
    "llama": ("llama", {}, {}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16", "tie_word_embeddings": True, "head_dim": 16}, {}),
    "norms behind": ("olmo2", {}, {}),
    "norms on both sides, tied": ("gemma2", {}, {}),
    "parallel layers": ("cohere", {}, {}),
    "experts": ("mixtral", {"intermediate_size": 76}, {}),
    "int8 weights": ("llama", {"tie_word_embeddings": True}, {"quantization": "int8"}),
    "w8a8": ("llama", {}, {"quantization": "w8a8"}),
    "int8 cache": ("llama", {}, {"kv_cache_dtype": "int8"}),
}
OF_TRANSFORMERS = ["llama", "norms behind", "norms on both sides, tied", "parallel layers", "experts"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_any_model(root / name, family, **config) for name, (family, config, _) in MODELS.items()}


@pytest.fixture(scope="module")
def adapter(folders, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapters") / "sql", folders["llama"], seed=5)


def cases(folders, adapter, min_tokens, **settings):
    """What is divided is in chunks of 70, so that the last ones have few tokens."""

    def case(name, **more):
        divided = {"sequence_parallel_min_tokens": min_tokens}
        return rank_case(folders[name], PROMPTS, NUM_NEW_TOKENS, 70, **divided, **settings, **more)

    found = {name: case(name, **more) for name, (*_, more) in MODELS.items()}
    lora = {**case("llama", lora=[f"sql={adapter}"]), "adapters": ["", "sql", "sql"] * 5}
    return found | {"adapter": lora}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def tp_size(request):
    return request.param


@pytest.fixture(scope="module")
def whole(tp_size, folders, adapter, tmp_path_factory):
    """What rank 0 samples, and what each rank says of itself."""
    return run_ranks(tmp_path_factory.mktemp("whole"), tp_size, cases(folders, adapter, 0))


@pytest.fixture(scope="module")
def divided(tp_size, folders, adapter, tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("divided"), tp_size, cases(folders, adapter, 1))


def token_ids(answers):
    return [[token["token_id"] for token in answer] for answer in answers]


@pytest.mark.parametrize("name", [*MODELS, "adapter"])
def test_answers_are_those_of_ranks_that_have_all_tokens(name, tp_size, whole, divided):
    if tp_size == 2:
        assert divided[0][name] == whole[0][name]  # with the logprobs of the whole vocabulary
    elif name != "bfloat16":  # where a sum in another order turns a token now and then
        assert token_ids(divided[0][name]) == token_ids(whole[0][name])


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_tokens_are_those_of_transformers(name, folders, divided):
    expected = generated(folders[name], PROMPTS, NUM_NEW_TOKENS)
    assert any(len(answer) == NUM_NEW_TOKENS for answer in expected)
    for ids, answer in zip(expected, token_ids(divided[0][name]), strict=True):
        assert answer[: len(ids)] == ids


def test_traits_tell_where_bits_may_differ(tp_size, whole, divided):
    for before, after in zip(whole[1], divided[1], strict=True):
        assert after["llama"]["description"]["sequence_parallel_min_tokens"] == "1"
        same = before["llama"]["traits"] == after["llama"]["traits"]
        is_exact = tp_size == 2 and before["llama"]["description"]["attention"] == "native"
        assert same == is_exact


@pytest.mark.long
def test_stages_of_two_ranks_pass_on_their_share(folders, adapter, tmp_path):
    given = cases(folders, adapter, 1, pipeline_parallel_size=2)
    sampled, _ = run_ranks(tmp_path, 4, {name: given[name] for name in OF_TRANSFORMERS})
    for name in OF_TRANSFORMERS:
        test_tokens_are_those_of_transformers(name, folders, (sampled,))


def test_only_large_steps_with_prompts_are_divided():
    class Two:
        rank, size = 1, 2

    def is_divided(*num_tokens, min_tokens=8):
        shares = [Share([5] * num, 0, list(range(8)), samples=True) for num in num_tokens]
        residual = residual_of(build_batch(shares, 8, torch.device("cpu")), Two(), min_tokens)
        assert residual.own == (range(sum(num_tokens) // 2, sum(num_tokens)) if residual.is_divided else residual.own)
        return residual.is_divided

    assert is_divided(8)
    assert is_divided(9, 1)
    assert is_divided(7, 1)
    assert not is_divided(7)
    assert not is_divided(*[1] * 20)  # a step of answers alone
    assert not is_divided(60, min_tokens=0)
    assert not is_divided(1, min_tokens=1)


def test_ranks_that_were_told_otherwise_are_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    outputs = []
    with rank_processes(2, "tests.unit.serving_node.group_process", "unlike_ranks", folder) as processes:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    sentence = f"{FLAG} must be the same on all ranks, and is 10, 11"
    assert [json.loads(output.splitlines()[-1]) for output in outputs] == [sentence] * 2


@pytest.mark.parametrize("kind", ["fake", "foreign"])
def test_models_that_are_not_divided_refuse_it(kind, tmp_path):
    write = {"fake": write_fake_model, "foreign": lambda folder: write_foreign_model(folder, "starcoder2")}[kind]
    computed = {
        "fake": "the fake model has no products",
        "foreign": "transformers computes Starcoder2ForCausalLM, with",
    }
    with pytest.raises(SettingsError, match=f"^{FLAG}: {computed[kind]}"):
        Engine(EngineSettings(model=str(write(tmp_path)), num_kv_blocks=64, sequence_parallel_min_tokens=9))
