"""Ranks that divide a step by tokens between the products of a layer, real processes over gloo: two of them answer to
the bit as they do undivided, and that is what transformers answers."""

import json

import pytest
import torch

from engine.build import build_engine
from engine.forward_batch import build_batch
from engine.native.linear import best_variant
from engine.parallel import residual_of
from serving_core.errors import SettingsError
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from tests.lora_adapters import write_adapter
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.toy_scheduler import random_prompts
from tests.transformers_models import generated, write_any_model, write_transformers_model
from tests.unit.engine.rank_process import TIMEOUT_S, rank_case, rank_processes, run_ranks

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
ADAPTED = "adapter"
QUICK = ["llama", "bfloat16"]
OF_TRANSFORMERS = {"llama", "norms behind", "norms on both sides, tied", "parallel layers", "experts"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_any_model(root / name, family, **config) for name, (family, config, _) in MODELS.items()}


@pytest.fixture(scope="module")
def adapter(folders, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapters") / "sql", folders["llama"], seed=5)


@pytest.fixture(
    scope="module",
    params=[(2, QUICK), *(pytest.param((size, [*MODELS, ADAPTED]), marks=pytest.mark.nightly) for size in (2, 3))],
    ids=["2, some", "2", "3"],
)
def ranks(request, folders, adapter, tmp_path_factory):
    """How many there are, which cases they were given, and of each, undivided and divided, what rank 0 sampled and what
    each rank says of itself."""
    tp_size, names = request.param
    given = {
        f"{name} {min_tokens}": case(name, folders, adapter, sequence_parallel_min_tokens=min_tokens)
        for name in names
        for min_tokens in (0, 1)
    }
    return tp_size, names, *run_ranks(tmp_path_factory.mktemp("ranks"), tp_size, given)


def case(name, folders, adapter, **settings):
    """In chunks of 70, so that the last ones have few tokens."""
    if name == ADAPTED:
        lora = rank_case(folders["llama"], PROMPTS, NUM_NEW_TOKENS, 70, lora=[f"sql={adapter}"], **settings)
        return {**lora, "adapters": ["", "sql", "sql"] * 5}
    return rank_case(folders[name], PROMPTS, NUM_NEW_TOKENS, 70, **MODELS[name][2], **settings)


def token_ids(answers):
    return [[token["token_id"] for token in answer] for answer in answers]


def check_tokens(answers, folder):
    """Up to where transformers ends an answer."""
    drafts = [[token["token_id"] for token in answer] for answer in answers]
    expected = generated(folder, PROMPTS, NUM_NEW_TOKENS, drafts)
    assert any(len(answer) == NUM_NEW_TOKENS for answer in expected)
    for ids, answer in zip(expected, token_ids(answers), strict=True):
        assert answer[: len(ids)] == ids


def test_answers_are_those_of_ranks_that_have_all_tokens(ranks):
    tp_size, names, sampled, facts = ranks
    for name in names:
        whole, divided = sampled[f"{name} 0"], sampled[f"{name} 1"]
        if tp_size == 2 or facts[0][f"{name} 0"]["numerics"]["is_batch_invariant"] == "yes":
            assert divided == whole, name  # with the logprobs of the whole vocabulary
        elif name != "bfloat16":  # where a sum in another order turns a token now and then
            assert token_ids(divided) == token_ids(whole), name


def test_tokens_are_those_of_transformers(folders, ranks):
    _, names, sampled, _ = ranks
    for name in OF_TRANSFORMERS & set(names):
        check_tokens(sampled[f"{name} 1"], folders[name])


def test_traits_tell_where_bits_may_differ(ranks):
    _, _, _, facts = ranks
    for rank in facts:
        whole, divided = rank["llama 0"], rank["llama 1"]
        assert divided["description"]["sequence_parallel_min_tokens"] == "1"
        assert divided["num_divided_passes"] > 0 == whole["num_divided_passes"]
        is_exact = whole["description"]["attention"] == "native" and best_variant(torch.float32) is not None
        assert (whole["numerics"] == divided["numerics"]) == is_exact


@pytest.mark.nightly
def test_stages_of_two_ranks_pass_on_their_share(folders, adapter, tmp_path):
    settings = {"sequence_parallel_min_tokens": 1, "pipeline_parallel_size": 2}
    given = {name: case(name, folders, adapter, **settings) for name in OF_TRANSFORMERS}
    sampled, _ = run_ranks(tmp_path, 4, given)
    for name in OF_TRANSFORMERS:
        check_tokens(sampled[name], folders[name])


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


@pytest.mark.nightly
def test_ranks_that_were_told_otherwise_are_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    outputs = []
    with rank_processes(2, "tests.unit.engine.group_process", "unlike_ranks", folder) as processes:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    sentence = f"{FLAG} must be the same on all ranks, and is 10, 11"
    assert [json.loads(output.splitlines()[-1]) for output in outputs] == [sentence] * 2


@pytest.mark.parametrize("kind", ["fake", "other"])
def test_models_that_are_not_divided_refuse_it(kind, tmp_path):
    write = {"fake": write_fake_model, "other": lambda folder: write_transformers_model(folder, "starcoder2")}[kind]
    computed = {
        "fake": "the fake model has no products",
        "other": "transformers computes Starcoder2ForCausalLM, with",
    }
    with pytest.raises(SettingsError, match=f"^{FLAG}: {computed[kind]}"):
        build_engine(EngineSettings(model=str(write(tmp_path)), num_kv_blocks=64, sequence_parallel_min_tokens=9))
