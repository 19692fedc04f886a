"""Nodes whose weights do not fit: most layers are on disk, and answers are those of transformers, also where stages and
ranks divide the model."""

import random

import pytest

from tests.system.greedy import check_greedy_answers
from tests.tiny_models import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.nightly

HIDDEN, INTERMEDIATE, NUM_LAYERS = 64, 128, 6
OUTSIDE_BYTES = 4 * VOCAB_SIZE * HIDDEN  # the embedding, or the head: float32, and tied
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)

# How each node is divided, and how many layers its first rank has on disk: of 6, or of 3.
CASES = [
    pytest.param({}, "6", id="alone"),
    pytest.param({"pipeline_parallel_size": 2}, "3", id="2 stages"),
    pytest.param({"tensor_parallel_size": 2, "sequence_parallel_min_tokens": 8}, "6", id="2 ranks, divided by tokens"),
]


@pytest.mark.parametrize(("division", "num_on_disk"), CASES)
async def test_answers_equal_transformers(division, num_on_disk, start_cluster, tmp_path):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": NUM_LAYERS}
    model = write_tiny_model(tmp_path / "model", num_key_value_heads=4, tie_word_embeddings=True, **sizes)
    tp_size = division.get("tensor_parallel_size", 1)
    limit = round((OUTSIDE_BYTES + 2.6 * LAYER_BYTES) / tp_size)
    cluster = start_cluster(
        model,
        node={
            "num_kv_blocks": 200,
            "weights_memory_bytes": limit,
            "weights_disk_path": str(tmp_path),
            **division,
        },
        prefill={"max_num_batched_tokens": 64},
        decode={"max_num_seqs": 3},
        start_deadline_s=600.0,
    )
    assert [node.engine["layers_offloaded"] for node in cluster.server_info().nodes] == [num_on_disk] * 2
    rng = random.Random(0)
    await check_greedy_answers(cluster, model, [[rng.randrange(256) for _ in range(size)] for size in (1, 8, 65, 300)])
    cluster.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
