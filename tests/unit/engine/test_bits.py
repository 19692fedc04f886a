"""One prompt cut into chunks and steps in many ways, alone and in company, by one thread and by two: the bits of its KV
and of its logits are the same."""

import itertools
import random

import pytest
import torch

from engine.build import build_engine
from engine.native.library import ENVIRONMENT, OFF
from engine.native.linear import VARIANTS as DENSE_VARIANTS
from engine.native.linear import best_variant
from engine.native_decode import NativeDecode
from serving_core.settings import EngineSettings
from tests.effort import effort, few
from tests.tiny_models import write_fake_model
from tests.transformers_models import DESCRIBED, MIXTURES, write_any_model
from tests.unit.engine.company import BLOCK_SIZE, Neighbour, has_variant
from tests.unit.engine.histories_kit import (
    MOST_NEIGHBOURS,
    check_histories,
    num_blocks_for,
    play,
    prompt_of,
    random_cuts,
)

NUM_TOKENS = 290  # of more than one tile of keys
PROMPT = prompt_of(NUM_TOKENS)

NATIVE = ("", "avx512", "avx2", "plain", OFF)
FAMILIES = {  # grouped and single heads, odd sizes, biases, windows beyond a tile and within, one key head
    "llama": {},
    "mistral": {"sliding_window": 261},
    "qwen2": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "intermediate_size": 333,
        "use_sliding_window": True,
        "sliding_window": 37,
        "max_window_layers": 1,
    },
    "qwen3": {"tie_word_embeddings": True, "head_dim": 20, "num_attention_heads": 7, "num_key_value_heads": 1},
}
KINDS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
    {"dtype": "float32", "quantization": "int4"},
    {"dtype": "float16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "w8a8"},
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Tiny models by their family."""
    folders = {}

    def folder(family):
        if family not in folders:
            path = tmp_path_factory.mktemp(family)
            folders[family] = write_any_model(path, family, seed=3, **FAMILIES.get(family, {}))
        return folders[family]

    return folder


def load(folder, **settings):
    sizes = {"block_size": BLOCK_SIZE, "num_kv_blocks": num_blocks_for(NUM_TOKENS, BLOCK_SIZE)}
    return build_engine(EngineSettings(model=str(folder), **{**sizes, **settings}))


def check(engine, seeds):
    torch.set_num_threads(1)
    kv, logits = play(engine, PROMPT, [NUM_TOKENS])
    for seed in (0, *seeds):
        torch.set_num_threads(1 + seed % 2)
        rng = random.Random(seed)
        neighbours = [Neighbour(index, rng) for index in range(seed % (MOST_NEIGHBOURS + 1))]
        cuts = random_cuts(NUM_TOKENS, seed) if seed else [NUM_TOKENS - 1, 1]
        again, others = play(engine, PROMPT, cuts, neighbours, seed)
        assert again == kv, seed
        assert others[NUM_TOKENS] == logits[NUM_TOKENS], seed


def products_are_native(kind):
    return kind.get("quantization") is not None or best_variant(getattr(torch, kind["dtype"])) is not None


IN_GATE = {*((family, "bfloat16") for family in (*FAMILIES, "gemma3", "mixtral")), ("llama", "float32")}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(*pair, marks=[] if pair in IN_GATE else pytest.mark.nightly)
        for pair in itertools.product(
            (*FAMILIES, *DESCRIBED), (str(dtype).removeprefix("torch.") for dtype in DENSE_VARIANTS)
        )
    ],
)
def test_the_cut_of_a_prompt_changes_no_bit(family, dtype, folder_of):
    """By the best kernels, as they are without any flag."""
    if not products_are_native({"dtype": dtype}):
        pytest.skip(f"{dtype} products are not native here")
    loaded = load(folder_of(family), dtype=dtype)
    assert loaded.is_batch_invariant
    assert isinstance(loaded.program, NativeDecode) == (family not in MIXTURES)
    check(loaded, effort((1, 4), (1, 2, 3, 4), (1, 2, 3, 4)))


@pytest.mark.parametrize(
    "family",
    few(["mistral", *DESCRIBED], "mixtral"),
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_nor_does_it_without_kernels_with_the_flag(dtype, family, folder_of, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, OFF)
    loaded = load(folder_of(family), dtype=dtype, batch_invariant=True)
    assert loaded.is_batch_invariant
    check(loaded, (3,))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_tests_of_a_device_check_holds_without_kernels_here(family, dtype, folder_of, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, OFF)
    torch.set_num_threads(1)
    num_tokens = 530
    num_blocks = num_blocks_for(num_tokens, 16)
    loaded = load(folder_of(family), dtype=dtype, batch_invariant=True, block_size=16, num_kv_blocks=num_blocks)
    assert loaded.is_batch_invariant
    check_histories(loaded, num_tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path(family, kind, native, flag, folder_of, monkeypatch):
    if not has_variant(native):
        pytest.skip(f"this CPU or installation has no {native} kernels")
    monkeypatch.setenv(ENVIRONMENT, native)
    loaded = load(folder_of(family), batch_invariant=flag, **kind)
    by_default = native != OFF and kind["dtype"] != "float16" and products_are_native(kind)
    if flag and not by_default and not loaded.is_batch_invariant:
        pytest.skip("torch's part keeps no such promise on this CPU, as the engine has found out at its start")
    assert loaded.is_batch_invariant == (flag or by_default)
    if loaded.is_batch_invariant:
        check(loaded, (2, 3))


def test_norms_that_stay_float32_do_not_hide_what_is_computed_in(folder_of):
    """Beside quantized weights they are all that there is of plain ones."""
    loaded = load(folder_of("gemma3"), dtype="float16", quantization="int8")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert not loaded.is_batch_invariant


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_keys_and_values_in_8_bits_are_not_promised(kv_cache_dtype, flag, folder_of):
    """The scale of a block grows with its tokens, and a row of a chunk sees the scale that later ones made."""
    assert not load(folder_of("llama"), kv_cache_dtype=kv_cache_dtype, batch_invariant=flag).is_batch_invariant


def test_the_fake_model_counts_tokens(tmp_path):
    assert load(write_fake_model(tmp_path)).is_batch_invariant
