"""What a node takes that is told nothing, or half of it, or what does not go together."""

import pytest

from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from serving_node.link import LinkSettings
from serving_node.serve import serve_node
from serving_node.settings import NodeSettings, TierSettings


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
    settings = NodeSettings(**told).resolved("prefill", device)
    assert (settings.max_num_batched_tokens, settings.max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            {"max_num_seqs": 1024, "engine": EngineSettings(device="cpu")},
            r"max_num_batched_tokens \(512\) must be at least max_num_seqs \(1024\)",
        ),
        (
            {"tier": TierSettings(kv_disk_bytes=1), "engine": EngineSettings(enable_prefix_caching=False)},
            "--kv-host-bytes and --kv-disk-bytes keep what --enable-prefix-caching finds, which is off",
        ),
        ({"link": LinkSettings("coordinator.example")}, "--coordinator coordinator.example has no port"),
        ({"tier": TierSettings(kv_disk_path="/mnt", kv_host_bytes=1)}, "--kv-disk-path is the folder of a file"),
        ({"engine": EngineSettings(weights_disk_path="/mnt")}, "--weights-disk-path is for what"),
    ],
)
async def test_what_does_not_go_together_is_refused_before_anything_is_loaded(told, sentence):
    with pytest.raises(SettingsError, match=sentence):
        await serve_node(NodeSettings(**told), "mixed", "a node without a model")
