"""Nodes whose layers are divided over stages: answers are those of transformers, whatever the grids of both sides."""

import itertools
import random

import pytest

from tests.system.cluster import wait_until
from tests.system.greedy import check_greedy_answers
from tests.tiny_models import write_tiny_model

WITHOUT, WITH = [(1, 1), (2, 1)], [(1, 2), (2, 2)]  # stages: TP and PP
PAIRS = [*itertools.product(WITHOUT, WITH), *itertools.product(WITH, WITHOUT), ((2, 2), (2, 2))]
NUM_LAYERS, NUM_BLOCKS = 3, 200


def flags(grid):
    return dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), grid, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2, tie_word_embeddings=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids="{0[0]}x{0[1]}".format)
async def test_answers_equal_transformers(prefill, decode, model, start_cluster):
    cluster = start_cluster(
        model,
        node={"num_kv_blocks": NUM_BLOCKS},
        prefill={**flags(prefill), "max_num_batched_tokens": 256},
        decode={**flags(decode), "max_num_seqs": 3},
        start_deadline_s=600.0,  # for up to nine processes
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 8, 65, 100, 400)]
    await check_greedy_answers(cluster, model, prompts)
    _check_memory(cluster, {"prefill-0": prefill, "decode-0": decode})
    cluster.stop()


def _check_memory(cluster, grids):
    """Each rank's pool holds its stage's layers and its own heads alone: K and V, blocks of 8, heads of 12 floats."""
    for name, (tp_size, pp_size) in grids.items():
        wait_until(lambda name=name, num=tp_size * pp_size: len(cluster.loads()[name].ranks) == num, "all ranks", 180.0)
        caches = [rank.kv_pool_bytes // (2 * NUM_BLOCKS * 8 * 12 * 4) for rank in cluster.loads()[name].ranks]
        layers = {1: [NUM_LAYERS], 2: [1, 2]}[pp_size]
        assert caches == [2 // tp_size * each for each in layers for _ in range(tp_size)]
