"""Layers in pinned host memory, against the same model wholly on the device."""

import gc

import pytest
import torch

from engine.build import build_engine
from engine.offload.layers_on_host import LayersOnHost
from engine.offload.residence import ROOM
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import greedy, run_all
from tests.transformers_models import write_any_model

PROMPTS = [[(7 * i + length) % 250 for i in range(length)] for length in (17, 130)]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "head_dim": 64}
NUM_TOKENS = 24
SLACK_BYTES = 2**20  # what torch rounds up


def engine_of(folder, **settings):
    chosen = {"enforce_eager": True, **settings}  # a graph computes with other kernels
    return build_engine(EngineSettings(model=str(folder), device="cuda", num_kv_blocks=64, **chosen))


def token_ids(engine):
    answers = run_all(engine, PROMPTS, greedy(NUM_TOKENS, ignore_eos=True), chunk_tokens=23)
    return [[token.token_id for token in answer] for answer in answers]


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("llama", "bfloat16", "none"),
        ("qwen2", "float32", "none"),
        ("qwen3", "bfloat16", "int8"),
        ("llama", "float32", "int4"),
    ],
)
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_tokens_are_those_of_the_model_on_the_device(tmp_path, family, dtype, quantization, share):
    folder = write_tiny_model(tmp_path, family, seed=3, **SIZES)
    chosen = {"dtype": dtype, "quantization": quantization}
    whole = engine_of(folder, **chosen)
    expected, limit = token_ids(whole), round(whole.weight_bytes * share)
    del whole
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = engine_of(folder, weights_memory_bytes=limit, **chosen)
    assert isinstance(engine.model.offloaded, LayersOnHost)
    assert torch.cuda.memory_allocated() - before - engine.kv_pool_bytes <= limit + SLACK_BYTES
    assert token_ids(engine) == expected
    assert token_ids(engine) == expected
    assert engine.model.offloaded.num_read_bytes > NUM_TOKENS * sum(engine.model.offloaded.layer_bytes.values())


def test_there_are_no_graphs(tmp_path):
    folder = write_tiny_model(tmp_path, seed=3, dtype="bfloat16", **SIZES)
    limit = engine_of(folder).weight_bytes * 3 // 4
    engine = engine_of(folder, weights_memory_bytes=limit, enforce_eager=False, block_size=256)
    assert engine.program is None
    assert int(engine.description["layers_offloaded"]) > ROOM


def test_a_mixture_of_experts(tmp_path):
    folder = write_any_model(tmp_path, "qwen2_moe", seed=2)
    whole = engine_of(folder, dtype="float32")
    offloaded = engine_of(folder, dtype="float32", weights_memory_bytes=whole.weight_bytes - 1)
    assert offloaded.model.offloaded is not None
    assert token_ids(offloaded) == token_ids(whole)


def test_host_memory_is_pinned_and_a_copy_does_not_hold_the_host_up(tmp_path):
    folder = write_tiny_model(tmp_path, seed=3, dtype="bfloat16", **SIZES)
    offloaded = engine_of(folder, weights_memory_bytes=engine_of(folder).weight_bytes * 3 // 4).model.offloaded
    assert all(piece.is_pinned() for layer in offloaded._layers.values() for piece in layer._pieces)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # what waits for the device raises
    try:
        for number in offloaded.layer_bytes:
            offloaded._begin(number)
            offloaded._end(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    num_bytes, seconds = offloaded.read_alone()
    assert num_bytes == sum(offloaded.layer_bytes.values())
    assert seconds > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"weights_memory_bytes": 4096}, r"--weights-memory-bytes 4096: these weights take \d+ at least"),
        ({"weights_memory_bytes": 2**20, "weights_disk_path": "/nvme"}, "--weights-disk-path: beside cuda"),
        ({"weights_memory_bytes": 2**20, "batch_invariant": True}, "--weights-memory-bytes: --batch-invariant"),
    ],
)
def test_what_cannot_be_is_a_sentence(tmp_path, flags, said):
    with pytest.raises(SettingsError, match=said):
        engine_of(write_tiny_model(tmp_path, **SIZES), **flags)
