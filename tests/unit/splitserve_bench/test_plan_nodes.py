"""Nodes on paper: what steps take on them and what they hold, worked out by hand, and where those of a plan are."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from engine.build import build_engine
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from serving_core.shapes import DECODE, MIXED, PREFILL
from splitserve.cli import main
from splitserve_bench.plan.candidates import Plan, Pool
from splitserve_bench.plan.fleets import JudgingClients, LinkedTransfers, run_clients
from splitserve_bench.plan.hardware import ATTENTION, DEVICES, LAYER_S, LINK, LINKS, MEMORY, PRODUCTS, Roofline, link_of
from splitserve_bench.plan.model_sizes import read_model_sizes
from splitserve_bench.plan.nodes import machines_of
from splitserve_bench.plan.report import commands_of
from splitserve_bench.plan.search import study_of
from splitserve_bench.serve.metrics import Limits, tpot_s, ttft_s
from splitserve_bench.simulate.costs import StepLoad
from splitserve_bench.simulate.events import Agenda
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import read_profile
from tests.tiny_models import write_tiny_llama, write_tiny_model
from tests.unit.splitserve_bench.plan_kit import (
    asked,
    asked_nodes,
    model_folder,
    paper_nodes,
    plan_of,
)
from tests.unit.splitserve_bench.simulate_kit import PROFILE, request

H100 = DEVICES["h100"]


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


@pytest.fixture
def nodes(folder):
    return asked_nodes(model=str(folder))


def test_a_lone_answer_reads_all_weights_once(folder):
    model = read_model_sizes(folder)
    steps = Roofline(model, H100, link_of("nvlink", H100), 1)
    read_bytes = (model.body_weights + model.head_weights) * 2 + 1000 * model.rank_token_bytes(1)
    assert steps.answers_s(1, 1000) == pytest.approx(read_bytes / (H100.bytes_per_s * MEMORY) + 8 * LAYER_S)


def test_a_long_prompt_is_bound_by_its_products(folder):
    model, num = read_model_sizes(folder), 4096
    steps = Roofline(model, H100, link_of("nvlink", H100), 1)
    products_s = 2 * model.body_weights * num / (H100.flops * PRODUCTS)
    attention_s = 4 * 16 * 64 * 8 * num * (num + 1) / 2 / (H100.flops * ATTENTION)
    head_s = model.head_weights * 2 / (H100.bytes_per_s * MEMORY)
    assert steps.chunk_s(num, 0) == pytest.approx(products_s + attention_s + head_s + 8 * LAYER_S)


QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


def test_of_experts_those_that_tokens_take_are_read_and_computed(tmp_path):
    model = read_model_sizes(model_folder(tmp_path / "moe", QWEN3_30B_A3B))
    assert model.weight_bytes / 2 == pytest.approx(30.53e9, rel=0.001)  # as published
    assert model.active_weights + 2 * model.head_weights == pytest.approx(3.35e9, rel=0.01)
    expert, always = 48 * 3 * 2048 * 768, model.body_weights - 48 * 128 * 3 * 2048 * 768
    assert model.active_weights == always + 8 * expert
    assert model.read_weights(1) == model.active_weights
    assert model.read_weights(16) == pytest.approx(always + 128 * (1 - (120 / 128) ** 16) * expert, rel=1e-4)
    steps, link = Roofline(model, H100, link_of("nvlink", H100), 1), 48 * LAYER_S
    head_s = model.head_weights * 2 / (H100.bytes_per_s * MEMORY)
    kv_s = 16 * 1000 * model.rank_token_bytes(1) / (H100.bytes_per_s * MEMORY)
    read_s = model.read_weights(16) * 2 / (H100.bytes_per_s * MEMORY)
    assert steps.answers_s(16, 1000) == pytest.approx(read_s + head_s + kv_s + link)
    products_s = 2 * model.active_weights * 8192 / (H100.flops * PRODUCTS)
    attention_s = 4 * 32 * 128 * 48 * 8192 * 8193 / 2 / (H100.flops * ATTENTION)
    assert steps.chunk_s(8192, 0) == pytest.approx(products_s + attention_s + head_s + link)


def test_layers_without_experts_and_shared_ones_count(tmp_path):
    fields = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "mlp_only_layers": [0, 1]}
    folder = model_folder(tmp_path / "moe", QWEN3_30B_A3B | fields | {"shared_expert_intermediate_size": 5632})
    model, heads = read_model_sizes(folder), 2 * (32 + 4) * 128
    mixture = 3 * (8 * 768 + 5632) + 129
    assert model.active_weights == 2048 * (48 * heads + 2 * 3 * 6144 + 46 * mixture)


def test_two_ranks_halve_the_work_and_pay_two_rings_a_layer(folder):
    model, link = read_model_sizes(folder), link_of("nvlink", H100)
    one, two = (Roofline(model, H100, link, tp) for tp in (1, 2))
    work_s = one.answers_s(8, 500) - 8 * LAYER_S
    rings_s = 16 * (2 * link.latency_s + 8 * 1024 * 2 / (link.bytes_per_s * LINK))
    assert two.answers_s(8, 500) == pytest.approx(work_s / 2 + 8 * LAYER_S + rings_s)


def test_stages_pass_answers_on_and_compute_parts_of_a_chunk_at_once(folder):
    model, link = read_model_sizes(folder), link_of("nvlink", H100)
    stage, staged = (Roofline(model, H100, link, 2, pp) for pp in (1, 2))

    def hops_s(num_tokens, num_sampled):
        num_bytes = 2 * num_tokens * 1024 * 2 + num_sampled * 5000 * 2
        return 2 * link.latency_s + num_bytes / (link.bytes_per_s * LINK)

    assert staged.answers_s(8, 500) == pytest.approx(stage.answers_s(8, 500) + hops_s(8, 8))
    assert staged.chunk_s(100, 7) == pytest.approx(stage.chunk_s(100, 7) + hops_s(100, 1))  # too few for two parts
    in_eight = 9 / 2 * stage.chunk_s(512, 7 + (4096 - 512) / 2) + hops_s(512, 1)
    assert staged.chunk_s(4096, 7) == pytest.approx(in_eight)


def test_beside_a_prompt_stages_compute_attention_of_answers_in_parts(nodes):
    (kind,) = machines_of(replace(nodes, tp_sizes=(1,), pp_sizes=(2,), max_num_batched_tokens=512)).kinds
    assert kind.profile.steps.attention_beside_factor == 9 / 16  # of eight parts, two at once but for the ends


def test_stages_hold_a_model_that_ranks_alone_do_not(nodes):
    model = read_model_sizes(nodes_folder(nodes))
    assert model.rank_token_bytes(1, 3) == model.rank_token_bytes(1) * 3 // 8  # three, three and two of eight layers
    body_bytes, head_bytes = model.body_weights * 2, model.head_weights * 2
    assert model.rank_weight_bytes(1, 3) == body_bytes * 3 // 8 + head_bytes
    small = replace(nodes, pp_sizes=(1, 2, 16), tp_sizes=(1,), device_memory_bytes=body_bytes)
    machines = machines_of(replace(small, gpus_per_host=16))
    [kind] = machines.kinds
    assert (kind.grid, kind.num_devices, kind.dollars_per_h) == ("TP1 PP2", 2, 9.5)
    assert kind.profile.kv_transfer.bytes_per_s == 2 * 450e9 * LINK  # each stage sends what it has
    assert [words.partition(":")[0] for words in machines.unfit] == ["h100, TP 1", "h100, TP 1, PP 16"]
    plan = Plan((Pool(PREFILL, kind, 1), Pool(DECODE, kind, 1)), 4, 4)
    assert (str(plan), plan.num_devices) == ("1P TP1 PP2 + 1D TP1 PP2", 4)
    study = study_of(asked(replace(small, gpus_per_host=4), gpus=4))
    up_words = " ".join(commands_of(study, plan))
    assert "--prefill-pp 2 --decode-pp 2" in up_words


def test_layers_that_have_no_room_are_read_while_a_step_computes(nodes):
    model = read_model_sizes(nodes_folder(nodes))
    layer_bytes = 2 * 1024 * (2 * (16 + 4) * 64 + 3 * 2048)
    other_bytes = 2 * 2 * 5000 * 1024
    small = replace(
        nodes, tp_sizes=(1,), weights_memory_bytes=other_bytes + 4 * layer_bytes, max_num_batched_tokens=16384
    )
    [kind] = machines_of(small).kinds  # two layers stay, and two of the other six are there at a time
    read_s = 6 * layer_bytes / (64e9 * LINK)
    in_memory = Roofline(model, H100, link_of("nvlink", H100), 1)
    assert kind.costs.step_s(StepLoad(8, 4000)) == pytest.approx(read_s)
    assert kind.costs.step_s(StepLoad(0, 0, 16384)) == pytest.approx(in_memory.chunk_s(16384, 0), rel=0.01)
    assert in_memory.chunk_s(16384, 0) > read_s
    assert kind.costs.step_s(StepLoad(8, 4000, 16, 0)) == pytest.approx(read_s)
    weight_bytes = other_bytes + 4 * layer_bytes
    assert kind.sizes.num_blocks == (int(80 * 2**30 * 0.9) - weight_bytes) // (16 * model.rank_token_bytes(1))
    [staged] = machines_of(replace(small, pp_sizes=(2,))).kinds
    assert not staged.profile.flags  # four layers and one of two matrices are no more than that
    [staged] = machines_of(replace(small, pp_sizes=(2,), weights_memory_bytes=other_bytes // 2 + 3 * layer_bytes)).kinds
    assert staged.costs.step_s(StepLoad(8, 4000)) > 2 * 3 * layer_bytes / (
        64e9 * LINK
    )  # one stage after the other, and hops


def test_too_little_memory_for_weights_is_no_node(nodes, tmp_path):
    with pytest.raises(SettingsError, match="h100, TP 1: --weights-memory-bytes 1000: these weights take"):
        machines_of(replace(nodes, weights_memory_bytes=1000))
    PROFILE.save(tmp_path / "profile.json")
    with pytest.raises(SettingsError, match="splitserve doctor takes that flag as well"):
        machines_of(replace(paper_nodes(tmp_path), weights_memory_bytes=10**8))


def test_a_node_has_the_memory_that_weights_leave(nodes):
    one, two = machines_of(nodes).kinds
    model = read_model_sizes(nodes_folder(nodes))
    assert one.sizes.num_blocks == (int(80 * 2**30 * 0.9) - model.weight_bytes) // (16 * model.rank_token_bytes(1))
    assert two.sizes.num_blocks > 2 * one.sizes.num_blocks * 0.99
    assert (two.profile.kv_transfer.bytes_per_s, two.dollars_per_h, two.watts) == (2 * 450e9 * LINK, 9.5, 1400)


def nodes_folder(nodes):
    return Path(nodes.model)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": ""}, "--model FOLDER is needed"),
        ({"prefill_hardware": (), "decode_hardware": (), "both_hardware": ()}, "--hardware NAME is needed"),
        ({"both_hardware": ("tpu",)}, "tpu is none of h100, h200, a100, l4, cpu"),
        ({"both_hardware": ("l4",), "prefill_hardware": (), "decode_hardware": (), "link": "nvlink"}, "no NVLink"),
        ({"device_memory_bytes": 1000}, "fits nowhere"),
    ],
)
def test_nodes_that_cannot_be_had(nodes, values, words):
    with pytest.raises(SettingsError, match=words):
        machines_of(replace(nodes, **values))


def test_a_price_is_of_a_device_by_whatever_name_it_is_called(tmp_path):
    replace(PROFILE, hardware="h100-80gb", tensor_parallel_size=2).save(tmp_path / "profile.json")
    nodes = replace(paper_nodes(tmp_path), watts=(("h100-80gb", 9.0),))
    (kind,) = machines_of(replace(nodes, dollars_per_h=(("h100", 3.0), ("a100", 1.0)))).kinds
    assert (kind.dollars_per_h, kind.watts) == (6.0, 18.0)
    (kind,) = machines_of(nodes).kinds
    assert kind.dollars_per_h == 2 * 4.75


def test_profiles_are_kinds_of_node_that_flags_choose_among(tmp_path):
    for name, hardware, tp in (("one", "fast", 1), ("two", "fast", 2), ("slow", "slow", 1)):
        replace(PROFILE, hardware=hardware, tensor_parallel_size=tp).save(tmp_path / f"{name}.json")
    paths = tuple(str(tmp_path / f"{name}.json") for name in ("one", "two", "slow"))
    own = replace(paper_nodes(tmp_path), profiles=paths, prefill_hardware=("fast",), decode_hardware=("slow",))
    machines = machines_of(own)
    assert [(kind.hardware, kind.num_devices) for kind in machines.kinds] == [("fast", 1), ("fast", 2), ("slow", 1)]
    plans = study_of(asked(own, gpus=4, candidates=99)).plans
    split = [plan for plan in plans if plan.count_of(PREFILL)]
    assert {pool.kind.hardware for plan in split for pool in plan.pools if pool.role == PREFILL} == {"fast"}
    assert {pool.kind.hardware for plan in split for pool in plan.pools if pool.role == DECODE} == {"slow"}
    with pytest.raises(SettingsError, match="the profiles are of fast, slow, not of h100"):
        machines_of(replace(own, both_hardware=("h100",)))
    with pytest.raises(SettingsError, match="--gpus-per-host 1: a node has 2 devices"):
        machines_of(replace(own, gpus_per_host=1))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(PROFILE, model="other"), "the profiles are of other, paper"),
        (
            replace(PROFILE, node=replace(PROFILE.node, block_bytes=8000)),
            "16 tokens in 8000 bytes, 16 tokens in 16000 bytes",
        ),
    ],
)
def test_profiles_of_a_plan_are_of_one_model_and_one_kv_cache(tmp_path, other, words):
    PROFILE.save(tmp_path / "profile.json")
    other.save(tmp_path / "other.json")
    own = paper_nodes(tmp_path)
    with pytest.raises(SettingsError, match=words):
        machines_of(replace(own, profiles=(*own.profiles, str(tmp_path / "other.json"))))


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"dollars_per_h": (("h10", 3.0),)}, "--price has h10, and the hardware is h100"),
        ({"watts": (("h100", 3.0), ("tpu", 1.0))}, "--watts has tpu"),
    ],
)
def test_a_price_of_no_hardware_is_refused(nodes, tmp_path, figures, words):
    with pytest.raises(SettingsError, match=words):
        machines_of(replace(nodes, **figures))
    PROFILE.save(tmp_path / "profile.json")
    with pytest.raises(SettingsError, match="and the hardware is measured"):
        machines_of(replace(paper_nodes(tmp_path), dollars_per_h=(("h10", 3.0),)))


def test_a_node_is_no_larger_than_a_host(nodes):
    machines = machines_of(replace(nodes, tp_sizes=(4, 8)))
    assert machines.unfit == ("h100, TP 8: a host has 4 devices",)
    with pytest.raises(SettingsError, match="fits nowhere: h100, TP 8: a host has 4 devices"):
        machines_of(replace(nodes, tp_sizes=(8,)))


def test_a_cell_with_fewer_devices_than_a_node_is_told_so(nodes):
    with pytest.raises(SettingsError, match="the smallest node has 4 devices, and a cell has 2"):
        study_of(asked(replace(nodes, tp_sizes=(4,)), gpus=4, cells=2))


def test_without_tp_a_profile_is_of_the_smallest_size_that_the_model_fits_on(tmp_path):
    folder = model_folder(tmp_path / "model")

    def saved(name, *flags):
        arguments = ["plan", "profile", "--model", str(folder), "--hardware", "cpu", *flags]
        result = CliRunner().invoke(main, [*arguments, "--save", str(tmp_path / name)])
        return result, tmp_path / name

    result, file = saved("default.json")
    assert result.exit_code == 0, result.output
    assert f"written: {file}, of cpu TP 1" in result.stderr
    _, one = saved("one.json", "--tp", "1")
    assert file.read_bytes() == one.read_bytes()
    result, file = saved("two.json", "--tp", "2")
    assert result.exit_code == 0, result.output
    assert read_profile(file).tensor_parallel_size == 2


def test_a_measured_profile_is_one_kind_of_node(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    (kind,) = machines_of(paper_nodes(tmp_path)).kinds
    assert kind.costs.step_s(StepLoad(2, 200)) == PROFILE.steps.answers.at(2, 100)


def test_a_measured_profile_is_simulated_as_by_splitserve_simulate(tmp_path):
    """Also what a node takes longer that has waited, and what it takes less beside one that rests."""
    steps = replace(PROFILE.steps, prompt_overhead_s=0.05, answers_alone_factor=0.5, prompts_alone_factor=0.6)
    profile = replace(PROFILE, steps=steps)
    profile.save(tmp_path / "profile.json")
    (kind,) = machines_of(paper_nodes(tmp_path)).kinds
    planned = [request(index, 60 + 7 * index, 4 + index % 3, 0.11 * index) for index in range(12)]
    for counts in ((1, 1, 0), (0, 0, 2), (2, 1, 1)):
        pools = [Pool(role, kind, count) for role, count in zip((PREFILL, DECODE, MIXED), counts, strict=True) if count]
        clients = JudgingClients(Agenda(), planned, Limits(), PROFILE.control.api_server_s, 0, 12, 12)
        run_clients(Plan(tuple(pools), sum(counts), 8), clients)
        found = simulate(profile, FleetSize(*counts), planned, max_concurrency=None, request_timeout_s=600.0)
        outcomes = found.outcomes
        assert [each.ttft_s for each in clients.judged] == pytest.approx(list(map(ttft_s, outcomes)))
        assert [each.tpot_s for each in clients.judged] == pytest.approx(list(map(tpot_s, outcomes)))


def test_flags_of_a_node_change_those_of_a_measured_profile(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    own = replace(paper_nodes(tmp_path), max_num_batched_tokens=0, max_num_seqs=0)
    (kind,) = machines_of(own).kinds
    assert kind.sizes == PROFILE.node
    machines = machines_of(replace(own, max_num_batched_tokens=128, max_num_seqs=7, max_model_len=100))
    sizes = replace(PROFILE.node, max_num_batched_tokens=128, max_num_seqs=7, max_model_len=100)
    assert (machines.kinds[0].sizes, machines.max_model_len) == (sizes, 100)


def test_nodes_step_as_on_such_devices_where_nothing_is_said(nodes):
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), ("h100", "cpu"))
    own = replace(nodes, max_num_batched_tokens=0, max_num_seqs=0, tp_sizes=(1,), **names)
    found = {
        kind.hardware: (kind.sizes.max_num_batched_tokens, kind.sizes.max_num_seqs) for kind in machines_of(own).kinds
    }
    assert found == {"h100": (2048, 256), "cpu": (512, 64)}


@pytest.mark.parametrize("hardware", ["h100", "l4", "cpu"])
def test_a_step_of_both_has_the_products_of_all_its_tokens_and_both_attentions(nodes, hardware):
    """So it takes no less than its prompt or its answers, and hardly more than one after the other."""
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), (hardware,))
    sizes = {"tp_sizes": (1,), "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    (kind,) = machines_of(replace(nodes, **sizes, **names)).kinds
    for num, context, chunk in ((1, 500, 64), (16, 200, 256), (128, 300, 1900), (128, 4000, 512)):
        prompts_s = kind.costs.step_s(StepLoad(0, 0, chunk, 0))
        answers_s = kind.costs.step_s(StepLoad(num, num * context))
        both_s = kind.costs.step_s(StepLoad(num, num * context, chunk, 0))
        assert max(prompts_s, answers_s) < both_s < 1.05 * (prompts_s + answers_s)


def test_a_profile_says_what_its_data_sheet_says(nodes, folder):
    kind, _ = machines_of(nodes).kinds
    steps, sheet = kind.profile.steps, Roofline(read_model_sizes(folder), H100, link_of("nvlink", H100), 1)
    for num, context in ((1, 0), (7, 300), (32, 2000)):
        assert steps.answers.at(num, context) == pytest.approx(sheet.answers_s(num, context), rel=0.02)
        assert steps.prompts.at(10 * num, context) == pytest.approx(sheet.chunk_s(10 * num, context), rel=0.03)


# ---- plans ----


def test_every_host_gets_some_of_each_role_and_no_node_is_on_two(nodes):
    placed = plan_of(nodes, 2, -3).placed()
    assert {host: sum(each.kind.tp for each in placed if each.host == host) for host in (0, 1)} == {0: 4, 1: 4}
    uneven = plan_of(nodes, 4, 4).placed()
    assert all({each.role for each in uneven if each.host == host} == {PREFILL, DECODE} for host in (0, 1))


def test_unlike_hardware_is_on_hosts_of_its_own(nodes):
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), ("h100", "a100"))
    kinds = machines_of(replace(nodes, **names)).kinds
    fast, slow = (next(kind for kind in kinds if kind.hardware == name) for name in ("h100", "a100"))
    plan = Plan((Pool(PREFILL, fast, 2), Pool(DECODE, slow, 2)), 4, 4, names_hardware=True)
    assert str(plan) == "2P h100 TP1 + 2D a100 TP1"
    assert plan.fits()
    assert sorted({(each.host, each.role) for each in plan.placed()}) == [(0, DECODE), (1, PREFILL)]
    assert plan.dollars_per_h == pytest.approx(2 * 4.75 + 2 * 2.2)


def test_bytes_go_by_the_narrower_end_and_the_link_between(nodes):
    machines = machines_of(nodes)
    one, two = machines.kinds
    plan = Plan((Pool(PREFILL, one, 4), Pool(DECODE, two, 1)), 8, 4)
    transfers = LinkedTransfers(Agenda(), plan)
    hosts = {placed.name: placed.host for placed in plan.placed()}
    near, far = (next(name for name in hosts if name.startswith(PREFILL) and hosts[name] == host) for host in (0, 1))

    def bytes_s(sender, receiver):
        return transfers.bytes_s(SimpleNamespace(name=sender), SimpleNamespace(name=receiver), 10**9)

    assert bytes_s("decode-0", near) == bytes_s(near, "decode-0") == pytest.approx(1e9 / (450e9 * LINK))
    assert bytes_s("decode-0", "decode-0") == pytest.approx(bytes_s(near, near) / 2)
    assert bytes_s("decode-0", far) == bytes_s(near, far) == pytest.approx(1e9 / (LINKS["ib"].bytes_per_s * LINK))


def test_a_shared_link_between_hosts_is_divided(nodes):
    one, _ = machines_of(replace(nodes, host_link="100g")).kinds
    assert one.host_bytes_per_s == pytest.approx(12.5e9 * LINK / nodes.gpus_per_host)


# ---- quantized weights, keys and values ----

BODY = 8 * 1024 * (2 * (16 + 4) * 64 + 3 * 2048)
END = 5000 * 1024


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


@pytest.mark.parametrize(
    ("quantization", "is_tied"),
    [
        ("int8", False),
        ("int4", False),
        pytest.param("int8", True, marks=pytest.mark.nightly),
        pytest.param("int4", True, marks=pytest.mark.nightly),
    ],
)
def test_they_take_what_an_engine_says_they_do(quantization, is_tied, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "head_dim": 64}
    write = write_tiny_model if is_tied else write_tiny_llama
    model = write(tmp_path / "model", **sizes, dtype="bfloat16", tie_word_embeddings=is_tied)
    engine = build_engine(EngineSettings(model=str(model), quantization=quantization, num_kv_blocks=4))
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
    migrated_bytes = 5 * (BODY + END) + 1000 * model.rank_token_bytes(1)
    assert steps.answers_s(1, 1000) == pytest.approx(migrated_bytes / (h100.bytes_per_s * MEMORY) + 8 * LAYER_S)


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
    words = " ".join(commands_of(study, Plan((Pool(MIXED, kind, 1),), 4, 4)))
    assert "--quantization int4 --kv-cache-dtype fp8_e4m3" in words
    plain = study_of(asked(asked_nodes(model=str(folder), tp_sizes=(1,)), gpus=4))
    words = " ".join(commands_of(plain, Plan((Pool(MIXED, plain.machines.kinds[0], 1),), 4, 4)))
    assert "--quantization" not in words
    assert "--kv-cache-dtype" not in words


@pytest.mark.parametrize("flags", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_what_was_measured_is_not_made_smaller(flags, tmp_path):
    name = next(iter(flags)).replace("_", "-")
    PROFILE.save(tmp_path / "profile.json")
    with pytest.raises(SettingsError, match=f"--{name} is for data sheets: .* takes that flag as well"):
        machines_of(replace(paper_nodes(tmp_path), **flags))
