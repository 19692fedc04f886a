"""What a node takes that is told nothing, or half of it."""

import pytest

from serving_node.settings import NodeSettings


@pytest.mark.parametrize(
    ("told", "device", "sizes"),
    [
        ({}, "cpu", (512, 64)),
        ({}, "cuda", (2048, 256)),
        ({"max_num_batched_tokens": 32}, "cuda", (32, 32)),  # a step has a token of each answer
        ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, "cpu", (7, 8)),
        ({"max_num_seqs": 1024}, "cuda", (2048, 1024)),
    ],
)
def test_a_step_is_as_large_as_its_device_is_fast(told, device, sizes):
    assert NodeSettings(**told).step_sizes(device) == sizes
