"""Plans of nodes whose weights or keys and values are quantized."""

from dataclasses import replace

import pytest

from engine.engine import Engine
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from serving_core.shapes import BOTH
from splitserve_bench.plan.commands import commands_of
from splitserve_bench.plan.devices import DEVICES, link_of
from splitserve_bench.plan.model_sizes import read_model_sizes
from splitserve_bench.plan.nodes import machines_of
from splitserve_bench.plan.plans import Plan, Pool
from splitserve_bench.plan.roofline import LAYER_S, MEMORY, Roofline
from splitserve_bench.plan.study import study_of
from tests.tiny_models import write_tiny_model
from tests.unit.splitserve_bench.plan_kit import asked, asked_nodes, model_folder, splitwise_file
from tests.unit.splitserve_bench.simulate_kit import PROFILE

BODY = 8 * 1024 * (2 * (16 + 4) * 64 + 3 * 2048)
END = 5000 * 1024


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


@pytest.mark.parametrize(
    ("quantization", "weight_bytes"),
    [
        ("none", 2 * BODY + 4 * END),
        ("int8", BODY + END + 2 * END),
        ("w8a8", BODY + END + 2 * END),
        ("int4", BODY * (4 + 40 / 32) / 8 + END + 2 * END),  # a float and a byte for 32 of them; a head of 8 bits
    ],
)
def test_quantized_weights_take_less(quantization, weight_bytes, folder):
    model = read_model_sizes(folder).stored_as(quantization, "auto")
    assert model.weight_bytes == weight_bytes
    assert model.rank_layer_bytes(1) == pytest.approx((weight_bytes - model.head_weight_bytes * END - 2 * END) / 8)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_they_take_what_an_engine_says_they_do(quantization, is_tied, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "head_dim": 64}
    model = write_tiny_model(tmp_path / "model", **sizes, dtype="bfloat16", tie_word_embeddings=is_tied)
    engine = Engine(EngineSettings(model=str(model), quantization=quantization, num_kv_blocks=4))
    planned = read_model_sizes(model).stored_as(quantization, "auto").weight_bytes
    assert engine.weight_bytes == pytest.approx(planned, rel=0.03)  # norms, and scales of 8 bits


def test_kernels_of_a_cpu_read_them_as_they_are(folder):
    cpu = DEVICES["cpu"]
    model = read_model_sizes(folder).stored_as("int8", "auto")
    steps = Roofline(model, cpu, link_of("10g", cpu), 1)
    read_bytes = BODY + END + 1000 * model.rank_token_bytes(1)
    assert steps.answers_s(1, 1000) == pytest.approx(read_bytes / (cpu.bytes_per_s * MEMORY) + 8 * LAYER_S)


def test_a_device_without_such_kernels_makes_them_whole_in_each_step(folder):
    h100 = DEVICES["h100"]
    model = read_model_sizes(folder).stored_as("int8", "auto")
    steps = Roofline(model, h100, link_of("nvlink", h100), 1)
    moved_bytes = 5 * (BODY + END) + 1000 * model.rank_token_bytes(1)
    assert steps.answers_s(1, 1000) == pytest.approx(moved_bytes / (h100.bytes_per_s * MEMORY) + 8 * LAYER_S)


def test_keys_and_values_in_8_bits_leave_room_for_twice_as_many(folder):
    nodes = asked_nodes(model=str(folder), tp_sizes=(1,))
    [plain], [small] = (machines_of(each).kinds for each in (nodes, replace(nodes, kv_cache_dtype="int8")))
    assert small.sizes.block_bytes == 8 * 2 * 4 * (16 * 64 + 4)  # layers, K and V, heads; a float32 scale of each block
    assert plain.sizes.block_bytes == 8 * 2 * 4 * 16 * 64 * 2
    assert 1.9 < small.sizes.num_blocks / plain.sizes.num_blocks < 2


def test_what_does_not_fit_may_fit_in_fewer_bits(folder):
    memory_bytes = int((2 * BODY + 4 * END) / 0.9)  # all of what may be used, with nothing left for KV
    nodes = asked_nodes(model=str(folder), tp_sizes=(1,), device_memory_bytes=memory_bytes)
    with pytest.raises(SettingsError, match="leave no room for KV"):
        machines_of(nodes)
    [kind] = machines_of(replace(nodes, quantization="int8")).kinds
    assert kind.sizes.num_blocks > 100


def test_the_commands_say_how_they_are_stored(folder):
    nodes = asked_nodes(model=str(folder), tp_sizes=(1,), quantization="int4", kv_cache_dtype="fp8_e4m3")
    study = study_of(asked(nodes, gpus=4))
    [kind] = study.machines.kinds
    words = " ".join(commands_of(study, Plan((Pool(BOTH, kind, 1),), 4, 4)))
    assert "--quantization int4 --kv-cache-dtype fp8_e4m3" in words
    plain = study_of(asked(asked_nodes(model=str(folder), tp_sizes=(1,)), gpus=4))
    words = " ".join(commands_of(plain, Plan((Pool(BOTH, plain.machines.kinds[0], 1),), 4, 4)))
    assert "--quantization" not in words
    assert "--kv-cache-dtype" not in words


@pytest.mark.parametrize("flags", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_what_was_measured_is_not_made_smaller(flags, folder, tmp_path):
    name = next(iter(flags)).replace("_", "-")
    hardware = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), ("h100-80gb",))
    table = str(splitwise_file(tmp_path / "perf_model.csv"))
    with pytest.raises(SettingsError, match=f"--{name} is for data sheets: tables have what was measured"):
        machines_of(asked_nodes(model=str(folder), profile=table, **hardware, **flags))
    PROFILE.save(tmp_path / "profile.json")
    none = dict.fromkeys(hardware, ())
    with pytest.raises(SettingsError, match=f"--{name} is for data sheets: .* takes that flag as well"):
        machines_of(asked_nodes(profile=str(tmp_path / "profile.json"), **none, **flags))
