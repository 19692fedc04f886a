"""Layers in host memory, beside a CPU, where copies are over at once: answers beside those of the same model in memory.
test_offload_streams.py has the order of copies, tests/gpu the same on a device."""

import pytest
import torch

from engine.build import build_engine
from engine.model.layers import Layer
from engine.offload import layers_on_host
from engine.offload.layers_on_host import PIECE_BYTES, HostStore, LayersOnHost
from engine.offload.placement import choose_store
from engine.offload.residence import ROOM
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import write_any_model

PROMPTS = [list(b"a prompt, of two blocks at least"), list(b"ab" * 20)]
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}


def engine_of(folder, **settings):
    return build_engine(EngineSettings(model=str(folder), num_kv_blocks=32, device="cpu", **settings))


def answers(engine):
    return token_ids(run_all(engine, PROMPTS, greedy(8, ignore_eos=True)))


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Weights as they are on devices, which nothing packs; layers beyond a limit go to host memory."""
    monkeypatch.setattr("engine.model.layers._packed", lambda weight, bias=None: None)
    monkeypatch.setattr("engine.quantization.quantized_linear.best_variant", lambda: None)
    monkeypatch.setattr("engine.build.choose_store", lambda settings, device: HostStore(device))


def tensors_of(modules):
    parts = [part for module in modules for part in module.modules() if isinstance(part, Layer)]
    return [each for part in parts for each in part.tensors]


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("llama", "float32", "none"),
        ("qwen2", "bfloat16", "int8"),
        pytest.param("qwen3", "float32", "int4", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_those_of_the_model_in_memory(written, monkeypatch, as_on_a_device, family, dtype, quantization):
    monkeypatch.setattr(layers_on_host, "PIECE_BYTES", 20_000)  # several for each layer
    folder = written(write_tiny_model, family, **SIZES)
    chosen = {"dtype": dtype, "quantization": quantization}
    whole = engine_of(folder, **chosen)
    limit = whole.weight_bytes * 3 // 4
    engine = engine_of(folder, weights_memory_bytes=limit, **chosen)
    offloaded = engine.model.offloaded
    assert isinstance(offloaded, LayersOnHost)
    assert (engine.weight_bytes, engine.program) == (whole.weight_bytes, None)
    expected = answers(whole)
    assert answers(engine) == expected
    moving = [engine.model.layers[str(number)] for number in offloaded.layer_bytes]
    elsewhere, placed = (
        [each for each in tensors_of(moving) if (each.untyped_storage().nbytes() >= each.nbytes) == is_held]
        for is_held in (False, True)
    )
    places = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in placed}
    staying = engine.weight_bytes - sum(each.nbytes for each in (*elsewhere, *placed))
    assert staying + sum(places.values()) <= limit
    assert len(places) == ROOM, "two layers have their places"
    assert elsewhere
    assert offloaded.num_read_bytes > 8 * sum(offloaded.layer_bytes.values())
    num_bytes, _ = offloaded.read_alone()
    assert num_bytes == sum(offloaded.layer_bytes.values())
    assert answers(engine) == expected


def test_experts_come_too(tmp_path, as_on_a_device):
    folder = write_any_model(tmp_path, "qwen2_moe", seed=2)
    whole = engine_of(folder, dtype="float32")
    offloaded = engine_of(folder, dtype="float32", weights_memory_bytes=whole.weight_bytes - 1)
    assert int(offloaded.description["layers_offloaded"]) > ROOM
    assert answers(offloaded) == answers(whole)


# ---- what it cannot do ----


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"weights_disk_path": "/nvme"}, "--weights-disk-path: beside cuda layers are in host memory"),
        ({"batch_invariant": True}, "--weights-memory-bytes: --batch-invariant tries products out"),
    ],
)
def test_what_it_cannot_do_beside_a_device_is_a_sentence(flags, said):
    with pytest.raises(SettingsError, match=said):
        choose_store(EngineSettings(weights_memory_bytes=2**30, **flags), torch.device("cuda"))


def test_host_memory_that_holds_too_little_is_a_sentence(written, monkeypatch, as_on_a_device):
    folder = written(write_tiny_model, **SIZES)
    limit = engine_of(folder).weight_bytes * 3 // 4
    monkeypatch.setattr(layers_on_host, "available_bytes", lambda: 4096)
    said = r"--weights-memory-bytes: a layer takes \d+ bytes of host memory, and 4096 are free"
    with pytest.raises(SettingsError, match=said):
        engine_of(folder, weights_memory_bytes=limit)


def test_pieces_are_of_the_sizes_that_torch_pins():
    assert PIECE_BYTES.bit_count() == 1
