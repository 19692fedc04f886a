"""The same questions, greedy and sampled, through everything that can happen to an answer: its tokens and its
log-probabilities have the bits that they have when it is alone. Each history must show that it took place."""

import json
import os

import pytest
import torch
from click.testing import CliRunner

from engine.native.library import ENVIRONMENT, OFF
from engine.native.linear import best_variant
from serving_core.errors import ModelError
from splitserve.cli import main
from splitserve.launch import models
from splitserve.launch.models import LocalModel
from splitserve_bench.bits import BitsBench, check_bits
from tests.tiny_models import write_tiny_model

HISTORIES = [
    "alone",
    "crowd",
    "prefix reuse",
    "chunks of 16",
    "chunks of 100",
    "chunks of 512",
    "second turn of a chat",
    "split",
    "migrated",
    "node killed",
    "colocated",
    "other threads",
    "preempted",
]
# Some answers are so long that they are still being written when their node is told to stop, or killed.
FEW = BitsBench(8, (3, 40, 17, 150, 600), (20, 220))
FIFTY = BitsBench(50, (1, 3, 16, 17, 40, 64, 100, 150, 257, 330, 600, 700), (8, 250))
OF_A_REAL_MODEL = BitsBench(6, (5, 130, 40, 600, 17), (16, 40))
OF_RANKS = BitsBench(4, (3, 40, 150, 600), (16, 32), tp_size=2)  # few, as two on a CPU wait for each other
CPUS = sorted(os.sched_getaffinity(0))
OTHER_FAMILIES = {
    "mistral": {"sliding_window": 20, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 10},
}

pytestmark = [
    pytest.mark.skipif(len(CPUS) < 2, reason="other numbers of threads need other numbers of CPUs"),
    pytest.mark.skipif(
        best_variant(torch.bfloat16) is None or best_variant(torch.float32) is None,
        reason="products are not native here",
    ),
]


def write_model(folder, family="llama", **config):
    return write_tiny_model(folder, family, **config, max_position_embeddings=2048)


async def check(model, sizes, except_for=(), **flags):
    """Plays all histories; they all take place, and none but those excepted changes a bit."""
    lines = []
    figures = await check_bits(LocalModel(model, "tested"), flags, sizes, CPUS, lines.append)
    assert [played.history for played in figures.histories] == HISTORIES
    bad = [played for played in figures.histories if not played.is_good and played.history not in except_for]
    assert not bad, "\n".join([*map(str, bad), *lines])
    return figures


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_nothing_that_happens_to_an_answer_changes_a_bit(dtype, tmp_path):
    model = write_model(tmp_path / "model", dtype=dtype)
    figures = await check(model, FEW)
    assert figures.promise == "promised: the same bits whatever happened to an output"


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_nor_any_of_fifty(tmp_path):
    await check(write_model(tmp_path / "model", dtype="bfloat16", seed=5), FIFTY)


@pytest.mark.nightly
@pytest.mark.parametrize("family", OTHER_FAMILIES)
async def test_nor_of_other_families(family, tmp_path):
    await check(write_model(tmp_path / "model", family, dtype="bfloat16", **OTHER_FAMILIES[family]), FEW)


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
async def test_nor_of_quantized_weights(quantization, tmp_path):
    model = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    await check(model, FEW, dtype="bfloat16", quantization=quantization)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_nor_of_two_ranks(dtype, tmp_path):
    """Each of one thread, unless there are CPUs for more."""
    model = write_model(tmp_path / "model", dtype=dtype)
    await check(model, OF_RANKS, except_for=() if len(CPUS) >= 4 else ("other threads",))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
async def test_nor_without_kernels_with_the_flag(dtype, tmp_path, monkeypatch):
    """At equal numbers of threads: with others torch may add in another order."""
    if dtype != "float16":
        monkeypatch.setenv(ENVIRONMENT, OFF)
    model = write_model(tmp_path / "model", dtype=dtype)
    figures = await check(model, FEW, except_for=("other threads", "preempted"), batch_invariant=True)
    assert figures.promise.endswith("(with equal numbers of threads)")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_nor_of_the_demo_model(dtype):
    try:
        demo = models.demo_folder(print)
    except ModelError as error:
        pytest.skip(f"no demo model here: {error}")
    await check(demo, OF_A_REAL_MODEL, dtype=dtype)


@pytest.mark.nightly
def test_doctor_finds_the_bits_that_keys_and_values_of_8_bits_change(tmp_path):
    model = write_model(tmp_path / "model", dtype="bfloat16")
    result = CliRunner().invoke(main, ["doctor", str(model), "--check-bits", "--kv-cache-dtype", "int8", "--json"])
    assert result.exit_code == 1, result.output
    figures = json.loads(result.stdout)
    assert figures["promise"].startswith("not promised: keys and values in 8 bits")
    differing = {each["history"] for each in figures["histories"] if each["difference"]}
    assert "alone" not in differing
    assert "chunks of 16" in differing
    assert "histories changed bits of outputs: " in figures["conclusion"]


@pytest.mark.nightly
def test_doctor_shows_a_line_for_each_history(tmp_path):
    model = write_model(tmp_path / "model", dtype="bfloat16")
    result = CliRunner().invoke(main, ["doctor", str(model), "--check-bits"])
    assert result.exit_code == 0, result.output
    assert all(any(line.startswith(history) for line in result.stdout.splitlines()) for history in HISTORIES)
