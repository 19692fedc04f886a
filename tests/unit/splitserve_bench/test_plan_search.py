"""The search for a plan: loads, probes, the race of plans, its command, and the commands that a plan prints."""

import io
import json
import re
import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from coordinator.control.slo import Limit, parse_slo_classes
from serving_core.errors import SettingsError
from serving_core.shapes import DECODE, MIXED, PREFILL
from splitserve.commands import roles
from splitserve.commands.serve import up
from splitserve_bench.compare.search import MOST_SEEDS, Counted, Goal, plain, settle
from splitserve_bench.plan.candidates import Plan, Pool, options_from_json
from splitserve_bench.plan.command import plan_command
from splitserve_bench.plan.fleets import ENOUGH_TOKENS, JudgingClients, Played, play, run_clients
from splitserve_bench.plan.loads import LoadOptions, Loads
from splitserve_bench.plan.nodes import machines_of
from splitserve_bench.plan.race import Progress
from splitserve_bench.plan.report import Finding, commands_of, plan_view
from splitserve_bench.plan.search import study_of
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.simulate.events import Agenda
from tests.effort import few
from tests.unit.splitserve_bench.plan_kit import (
    asked,
    asked_nodes,
    model_folder,
    paper_nodes,
    plan_of,
)
from tests.unit.splitserve_bench.simulate_kit import PROFILE, request


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


@pytest.fixture
def nodes(folder):
    return asked_nodes(model=str(folder))


# ---- probes ----


def test_a_probe_counts_what_one_can_work_out(tmp_path):
    """On the machine of paper a lone request takes 4 + 2 + 22 ms to its first token, and 21 ms for each after it."""
    PROFILE.save(tmp_path / "profile.json")
    (kind,) = machines_of(paper_nodes(tmp_path)).kinds
    plan = Plan((Pool(MIXED, kind, 1),), 1, 1)
    planned = [request(index, 20, 5, 10.0 * index) for index in range(10)]

    def played(ttft_ms, tpot_ms, attainment=0.9):
        limits = Limits(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)
        counts = {"rate": 0.1, "num_before": 2, "num_counted": 6, "api_server_s": PROFILE.control.api_server_s}
        return play(plan, planned, limits, attainment=attainment, **counts)

    good = played(28.1, 21.1)
    assert (good.num_good, good.num_counted, good.is_early) == (6, 6, False)
    assert (good.ttfts_s, good.tpots_s) == (pytest.approx([0.028] * 6), pytest.approx([0.021] * 6))
    assert played(27.9, 21.1).missed == {"TTFT": 3}  # of six, of which three probes may miss 0.6 each
    slow = played(28.1, 20.9)
    assert (slow.missed, slow.is_early, slow.num_good) == ({"TPOT": 3}, True, 3)
    assert played(28.1, 20.9, 1.0).missed == {"TPOT": 1}
    assert played(28.1, 20.9, 0.5).missed == {"TPOT": 6}  # to the end


def test_an_answer_is_not_waited_for_once_its_pace_is_known(tmp_path):
    """A token of a lone answer takes 21 ms."""
    PROFILE.save(tmp_path / "profile.json")
    (kind,) = machines_of(paper_nodes(tmp_path)).kinds
    planned, limits = [request(0, 20, 400, 0.0)], Limits(tpot_s=0.0211)
    clients = JudgingClients(Agenda(), planned, limits, PROFILE.control.api_server_s, 0, 1, 1, ENOUGH_TOKENS)
    run_clients(Plan((Pool(MIXED, kind, 1),), 1, 1), clients)
    assert clients.agenda.now < 400 * 0.021 / 3
    clients.close()
    assert clients.judged[0].tpot_s == pytest.approx(0.021, rel=1.01 / ENOUGH_TOKENS)  # one token more or less


def test_a_fleet_that_is_late_before_it_is_full_is_not_filled(tmp_path):
    """A prompt takes 22 ms, and 50 a second come: the queue grows by a tenth, beyond 0.1 s soon."""
    PROFILE.save(tmp_path / "profile.json")
    (kind,) = machines_of(paper_nodes(tmp_path)).kinds
    planned, limits = [request(index, 20, 1, 0.02 * index) for index in range(2000)], Limits(ttft_s=0.1)
    clients = JudgingClients(Agenda(), planned, limits, PROFILE.control.api_server_s, 1500, 50, 15, ENOUGH_TOKENS)
    run_clients(Plan((Pool(MIXED, kind, 1),), 1, 1), clients)
    assert (clients.is_early, len(clients.judged)) == (True, 50)
    assert sum(judged.is_good is False for judged in clients.judged) == 16
    assert clients.agenda.now < 0.02 * 1500


def test_an_answer_that_goes_on_at_the_end_is_judged_by_whole_tokens(tmp_path):
    """The last request begins 2.9 tokens of 21 ms after another one, of which 3 have come: two in 42 ms, and a third
    of which 19 ms are over."""
    PROFILE.save(tmp_path / "profile.json")
    (kind,) = machines_of(paper_nodes(tmp_path)).kinds
    planned = [request(index, 20, 5, 10.0 * index) for index in range(4)]
    planned += [request(4, 20, 50, 100.0), request(5, 20, 5, 100.0 + 2.9 * 0.021)]
    counts = {
        "rate": 0.1,
        "num_before": 0,
        "num_counted": 6,
        "api_server_s": PROFILE.control.api_server_s,
        "attainment": 0.9,
    }
    played = play(Plan((Pool(MIXED, kind, 2),), 2, 2), planned, Limits(tpot_s=0.022), **counts)
    assert (played.num_good, played.missed) == (6, {})


@pytest.mark.parametrize("attainment", few([0.05, 0.3, 0.5, 0.6, 0.7, 0.75, 0.9, 0.95, 0.99, 1.0], 0.3, 0.9, 1.0))
def test_a_probe_that_ends_early_is_no_pass(tmp_path, attainment):
    """Also not of all seeds of its rate together, when the others find everything good."""
    PROFILE.save(tmp_path / "profile.json")
    (kind,) = machines_of(paper_nodes(tmp_path)).kinds
    planned = [request(index, 20, 5, 10.0 * index) for index in range(40)]
    nobody = Limits(ttft_s=0.001)
    counts = {"rate": 0.1, "num_before": 0, "num_counted": 40, "api_server_s": PROFILE.control.api_server_s}
    played = play(Plan((Pool(MIXED, kind, 1),), 1, 1), planned, nobody, attainment=attainment, **counts)
    assert (played.num_good + (MOST_SEEDS - 1) * 40) / (MOST_SEEDS * 40) < attainment or played.num_good == 0


def test_all_rates_have_the_same_requests(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{second:02},{100 + second},{5 + second}" for second in (0, 3, 4, 9)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    loads = Loads(LoadOptions("azure", str(trace), 1.0, 1, 1, 0.0, 1.0, 0), 5000, 4096)
    slow, fast = loads.load(1.0, 10, 0), loads.load(4.0, 10, 0)
    assert [(each.prompt, each.output_tokens) for each in slow] == [(each.prompt, each.output_tokens) for each in fast]
    assert [each.send_at_s for each in slow] == pytest.approx([4 * each.send_at_s for each in fast])
    assert slow[-1].send_at_s == pytest.approx(9.0)
    assert len({each.prompt for each in slow}) == 10
    assert [len(each.prompt) for each in slow[4:8]] == [len(each.prompt) for each in slow[:4]]


@pytest.mark.parametrize("dataset", ["azure", "random"])
def test_a_longer_load_begins_with_the_requests_of_a_shorter_one(tmp_path, dataset):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00,50,5\n2023-11-16 18:15:04,60,6\n")
    asked = LoadOptions(dataset, str(trace), 1.0, 40, 4, 0.5, 1.0, 0)
    grown, whole = Loads(asked, 5000, 4096), Loads(asked, 5000, 4096)
    for num in (3, 8, 11):
        some = grown.load(1.0, num, 1)
    assert [each.prompt for each in some] == [each.prompt for each in whole.load(1.0, 11, 1)]


# ---- what is told ----


def raced(study, shares):
    """A race to its end between plans that pass up to these shares of the rate at which they are probed first, and the
    progress that was told of it: a probe a second."""
    race = study.race()
    knees = [share * runner.goal.first_rate for share, runner in zip(shares, race.runners, strict=True)]
    progress, lines = Progress(race, study.plans, 2, 0.0), []
    while chosen := race.next():
        index, probe = chosen
        share = 0.99 if probe.rate <= knees[index] else 0.5
        race.record(index, Played(probe.rate, round(share * 1000), 1000, 1000.0, [0.1], [0.01], {}, False))
        progress.played(float(progress.num_played + 1))
        lines.append(progress.line(float(progress.num_played)))
    return knees, lines


def test_progress_tells_the_best_plan_and_what_is_done(nodes):
    study = study_of(asked(nodes, gpus=4))
    (knee, *_), lines = raced(study, [2.0, 1.2, 0.2, 0.1])
    assert f"best so far {study.plans[0]} at about" in lines[0]  # after one quick probe
    assert "or more req/s" in lines[0]
    last = lines[-1]
    assert "2 of 2 plans in the race decided" in last
    assert f"best so far {study.plans[0]} at" in last
    assert f"then {study.plans[1]} at" in last
    assert last.endswith("about 0 s left")
    best = re.search(r"at ([\d.]+) to ([\d.]+) req/s", last)
    assert float(best[1]) / 1.01 <= 2 * knee <= float(best[2]) * 1.01  # of two cells, as they are printed


def test_a_p90_is_that_of_all_requests_of_its_probes(nodes):
    """Of 10 and 20 requests the ninth tenths are 1.0 and 0.1 s; of all 30 it is 0.1, and no mean of those."""
    study = study_of(asked(nodes, candidates=1))
    few = Played(7.0, 9, 10, 10.0, [0.1] * 8 + [1.0] * 2, [0.01], {}, False)
    many = replace(few, num_good=19, num_counted=20, ttfts_s=[0.1] * 20)
    curve = (Counted(7.0, 28, 30, 30.0),)
    result = settle(curve, Goal(7.0), 2)
    found = Finding(study.plans[0], result, curve, (few, many), (), is_raced=True, scale=1.0)
    told = Console(file=io.StringIO(), width=200)
    told.print(plan_view(study, [found]))
    assert "100.0 ms" in told.file.getvalue()


# ---- a search ----


def test_what_is_asked_goes_to_other_processes_and_back(nodes):
    question = asked(replace(nodes, dollars_per_h=(("h100", 4.0),)))
    assert options_from_json(question.to_json()) == question


def test_a_colocated_plan_is_always_tried(nodes):
    study = study_of(asked(nodes, gpus=4, candidates=2))
    assert any(plan.count_of(MIXED) == sum(pool.count for pool in plan.pools) for plan in study.plans)
    assert all(plan.num_devices <= 4 for plan in study.plans)


def test_the_cheaper_hardware_wins_by_cost(nodes):
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), ("h100", "a100"))
    free = {"dollars_per_h": (("h100", 1000.0), ("a100", 1.0))}
    study = study_of(asked(replace(nodes, **names, **free), objective="cost"))
    assert {pool.kind.hardware for pool in study.plans[0].pools} == {"a100"}
    assert "a100" in str(study.plans[0])


def test_what_measured_nodes_cost_has_to_be_said(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    question = asked(paper_nodes(tmp_path), objective="cost", goodput=("ttft:3000 tpot:200",))
    with pytest.raises(SettingsError, match="--cost needs a figure above 0 of all hardware, measured: --price"):
        study_of(question)
    nodes = replace(question.nodes, dollars_per_h=(("measured", 0.05),))
    assert {plan.dollars_per_h for plan in study_of(replace(question, nodes=nodes)).plans} == {0.1}


# ---- the command ----


def invoke(*words):
    return CliRunner().invoke(plan_command, words)


SIZES = ("--tp", "1", "--random-input-len", "200", "--random-output-len", "8", "--candidates", "2", "--seconds", "0.01",
         "--jobs", "1")  # fmt: skip
SHORT = ("--max-probes", "2", "--num-prompts", "5")
LONG = ("--max-probes", "6", "--num-prompts", "30")
REACHED = ("--slo", "ttft:3000", "tpot:200")


@pytest.mark.nightly
def test_the_command_finds_a_plan_and_says_how_to_run_it(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    words = ("--profile", str(tmp_path / "profile.json"), "--gpus", "2", *SIZES, *LONG, *REACHED)
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert {each["plan"] for each in found["plans"]} == {"2B TP1", "1P TP1 + 1D TP1"}
    best = found["plans"][0]
    assert best["objective"] == pytest.approx(best["goodput_per_s"] / 2)
    assert found["words"][0].startswith(f"Best: {best['plan']}")
    command = next(line for line in found["commands"] if "splitserve up" in line).split()
    up.make_context("up", command[2:])  # its flags are those of `up`
    assert f"--{'both' if best['plan'] == '2B TP1' else 'prefill'}" in command


@pytest.mark.nightly
def test_any_number_of_processes_finds_the_same_to_the_byte(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    words = ("--profile", str(tmp_path / "profile.json"), "--gpus", "2", *SIZES, *LONG, *REACHED, "--json")
    assert len({invoke(*words, "--jobs", jobs).stdout for jobs in ("1", "2")}) == 1


def test_what_is_printed_has_the_table_and_the_words(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    result = invoke("--profile", str(tmp_path / "profile.json"), "--gpus", "2", *SIZES, *SHORT, *REACHED)
    assert result.exit_code == 0, result.output
    assert "paper: 2 devices; 90% of requests with TTFT ≤ 3000 ms, TPOT ≤ 200 ms" in result.stdout
    assert "req/s a device" in result.stdout
    assert "best so far" in result.stderr
    assert "Best: " in result.stdout


def test_a_command_is_printed_on_one_line(crew_here, tmp_path):
    folder = model_folder(tmp_path / "long" / ("name" * 40))
    words = ("--model", str(folder), "--hardware", "cpu", "--gpus", "2", *SIZES, *SHORT, *REACHED, "--candidates", "1")
    result = invoke(*words)
    (command,) = (line for line in result.stdout.splitlines() if "splitserve up" in line)
    assert command.split()[2] == str(folder)
    assert "--kv-cache-memory-bytes" in command


def test_what_is_clipped_is_told(crew_here, tmp_path):
    replace(PROFILE, node=replace(PROFILE.node, max_model_len=128)).save(tmp_path / "profile.json")
    words = ("--profile", str(tmp_path / "profile.json"), "--gpus", "1", *SIZES, *SHORT, *REACHED, "--max-probes", "1")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "100.0% of the requests are longer than 128 tokens, and are clipped to that" in result.stderr
    assert "clipped" not in invoke(*words, "--random-input-len", "120", "--random-output-len", "8").stderr


def test_limits_that_nobody_meets_are_told_so(crew_here, tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    words = ("--profile", str(tmp_path / "profile.json"), "--gpus", "2", *SIZES, *SHORT, "--slo", "ttft:1")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    found = json.loads(invoke(*words, "--json").stdout)
    lowest = min(probe["request_rate"] for each in found["plans"] for probe in each["quick_probes"])
    told = f"No plan reaches the goal at any rate that was tried: the lowest was {plain(lowest)} req/s a cell."
    assert told in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--profile", "{profile}"), "--gpus N is needed"),
        (("--profile", "{profile}", "--gpus", "3", "--cells", "2"), "3 devices cannot be divided evenly"),
        (("--profile", "{profile}", "--gpus", "2", "--tp", "0"), "no parallel size"),
        (("--profile", "{profile}", "--gpus", "2", "--price", "h100"), "not HARDWARE=NUMBER"),
    ],
)
def test_flags_that_contradict_are_refused(tmp_path, words, said):
    PROFILE.save(tmp_path / "profile.json")
    result = invoke(*(word.format(profile=tmp_path / "profile.json") for word in words))
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dataset", "azure"), "needs a trace: --dataset-path"),
        (("--dataset-path", __file__), "--dataset-path is of a data set that is a file"),
        (("--length-scale", "2"), "--length-scale 2 is of a trace's lengths"),
        (("--dataset", "azure", "--dataset-path", __file__, "--burstiness", "9"), "--burstiness 9 is of random"),
    ],
)
def test_data_sets_that_contradict_are_refused(tmp_path, words, said):
    PROFILE.save(tmp_path / "profile.json")
    result = invoke("--profile", str(tmp_path / "profile.json"), "--gpus", "2", *words)
    assert isinstance(result.exception, SettingsError)
    assert said in str(result.exception)


def test_without_limits_nothing_is_searched(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    result = invoke("--profile", str(tmp_path / "profile.json"), "--gpus", "2")
    assert isinstance(result.exception, SettingsError)
    assert "--goodput is needed" in str(result.exception)


# ---- the commands of a plan: what they start is what was simulated ----


def test_the_commands_of_a_plan_say_what_has_no_room(nodes):
    held_bytes = 100_000_000
    study = study_of(asked(replace(nodes, weights_memory_bytes=held_bytes), gpus=4))
    one, two = study.machines.kinds
    assert (one.profile.flags, two.profile.flags) == (
        {"weights_memory_bytes": held_bytes},
        {},
    )  # two ranks hold 82 MB each
    mixed = Plan((Pool(PREFILL, one, 1), Pool(DECODE, two, 1)), 4, 4)
    assert f"--weights-memory-bytes {held_bytes}" in " ".join(commands_of(study, mixed))
    assert "--weights-memory-bytes" not in " ".join(commands_of(study, Plan((Pool(MIXED, two, 1),), 4, 4)))


def test_nodes_on_several_hosts_are_started_one_by_one(nodes):
    study = study_of(asked(nodes, gpus=8))
    head, coordinator_words, *lines = commands_of(study, plan_of(nodes, 2, -3))
    assert head.startswith("Run it on 2 hosts, with SPLITSERVE_FLEET_SECRET and SPLITSERVE_API_KEY set")
    program, role, *words = shlex.split(coordinator_words, comments=True)
    assert (program, role) == ("splitserve", "coordinator")
    flags = roles.coordinator.make_context(role, words).params
    assert {flags[name] for name in ("host", "http_host", "fleet_host")} == {"0.0.0.0"}
    taken = {"0": [], "1": []}  # devices of each host
    for line in lines:
        visible, program, role, *words = shlex.split(line, comments=True)
        flags = {"prefill": roles.prefill, "decode": roles.decode}[role].make_context(role, words).params
        assert flags["kv_bind"] == "tcp://eth0:*"
        devices = visible.removeprefix("CUDA_VISIBLE_DEVICES=").split(",")
        assert len(devices) == flags["tensor_parallel_size"]
        taken[line.split("# host ")[1][0]] += devices
    assert taken == {"0": ["0", "1", "2", "3"], "1": ["0", "1", "2", "3"]}


@pytest.mark.parametrize(
    ("profile", "hardware", "told"),
    [("", ("cpu",), {"0", "1", "2", "3"}), ("profile.json", (), {"1/4", "2/4", "3/4", "4/4"})],
)
def test_nodes_without_cuda_get_cores_of_their_own(nodes, tmp_path, profile, hardware, told):
    PROFILE.save(tmp_path / "profile.json")
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), hardware)
    nodes = replace(nodes, profiles=(str(tmp_path / profile),) if profile else (), tp_sizes=(1,), **names)
    (kind,) = machines_of(nodes).kinds
    _, _, *lines = commands_of(study_of(asked(nodes, gpus=8)), Plan((Pool(MIXED, kind, 8),), 8, 4))
    words = [shlex.split(line, comments=True) for line in lines]
    cpus = [roles.mixed.make_context("mixed", each[2:]).params["cpus"] for each in words]
    assert (len(cpus), set(cpus[:4]), set(cpus[4:])) == (8, told, told)


def made(commands):
    """The settings that a command's flags stand for, by the words before them."""
    contexts = {"up": up, "coordinator": roles.coordinator, "prefill": roles.prefill, "decode": roles.decode}
    found = {}
    for line in commands:
        words = shlex.split(line, comments=True)
        if "splitserve" in words:
            at = words.index("splitserve")
            found.setdefault(words[at + 1], []).append(
                contexts[words[at + 1]].make_context("it", words[at + 2 :]).params
            )
    return found


def test_a_cluster_knows_the_limits_that_requests_were_simulated_with(nodes):
    study = study_of(asked(nodes, gpus=8, goodput=("ttft:1234567.5 tpot:0.25",)))
    near = made(commands_of(study, plan_of(nodes, 2, 2)))["up"]
    far = made(commands_of(study, plan_of(nodes, 2, -3)))["coordinator"]
    for (flags,) in (near, far):
        (limits,) = parse_slo_classes(flags["slo_class"])
        assert (limits.name, limits.ttft, limits.tpot) == ("default", Limit(1234567.5), Limit(0.25))
    whole = study_of(asked(nodes, gpus=8, goodput=("e2el:900",)))  # of which no server knows
    assert "--slo-class" not in " ".join(commands_of(whole, plan_of(nodes, 2, 2)))


@pytest.mark.parametrize("gpus_per_host", [8, 2])
def test_nodes_have_the_flags_that_they_were_measured_with(tmp_path, gpus_per_host):
    flags = {"quantization": "w8a8", "batch_invariant": True, "weights_disk_path": "/a b"}
    replace(PROFILE, flags=flags).save(tmp_path / "profile.json")
    study = study_of(asked(replace(paper_nodes(tmp_path), gpus_per_host=gpus_per_host), gpus=4))
    (kind,) = study.machines.kinds
    plan = Plan((Pool(PREFILL, kind, 2), Pool(DECODE, kind, 2)), 4, gpus_per_host)
    found = made(commands_of(study, plan))
    nodes = found["up"] if gpus_per_host == 8 else [*found["prefill"], *found["decode"]]
    assert len(nodes) == (1 if gpus_per_host == 8 else 4)
    assert all(flags.items() <= each.items() for each in nodes)


def test_nodes_of_unlike_flags_are_started_one_by_one(tmp_path):
    for name, flags in (("plain", {}), ("small", {"quantization": "w8a8"})):
        replace(PROFILE, hardware=name, flags=flags).save(tmp_path / f"{name}.json")
    paths = tuple(str(tmp_path / f"{name}.json") for name in ("plain", "small"))
    study = study_of(asked(replace(paper_nodes(tmp_path), profiles=paths), gpus=2))
    plain_kind, small = study.machines.kinds
    found = made(commands_of(study, Plan((Pool(PREFILL, plain_kind, 1), Pool(DECODE, small, 1)), 2, 2)))
    assert [flags["quantization"] for role in ("prefill", "decode") for flags in found[role]] == ["none", "w8a8"]


def test_the_longest_request_that_was_planned_for_is_the_longest_that_is_taken(nodes):
    nodes = replace(nodes, max_model_len=300)
    study = study_of(asked(nodes, gpus=8))
    assert made(commands_of(study, plan_of(nodes, 2, 2)))["up"][0]["max_model_len"] == 300
    others = made(commands_of(study, plan_of(nodes, 2, -3)))
    assert {flags["max_model_len"] for role in ("prefill", "decode") for flags in others[role]} == {300}


def test_nodes_of_unlike_sizes_get_the_pools_that_they_were_simulated_with(nodes):
    """One size for all would be the smaller one; a CUDA node takes its own share of its device."""
    study = study_of(asked(nodes, gpus=4))
    one, two = study.machines.kinds
    assert one.kv_cache_memory_bytes < two.kv_cache_memory_bytes
    plan = Plan((Pool(PREFILL, one, 2), Pool(DECODE, two, 1)), 4, 4)
    (flags,) = made(commands_of(study, plan))["up"]
    assert not flags["kv_cache_memory_bytes"]
    assert flags["gpu_memory_utilization"] == 0.9
    alike = made(commands_of(study, Plan((Pool(PREFILL, one, 2), Pool(DECODE, one, 2)), 4, 4)))["up"]
    assert alike[0]["kv_cache_memory_bytes"] == one.kv_cache_memory_bytes


@pytest.mark.parametrize("values", [{"device_memory_bytes": 2**34}, {"hardware": "cpu"}])
def test_unlike_nodes_whose_memory_is_no_share_of_a_device_are_started_one_by_one(nodes, values):
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), (values.pop("hardware", "h100"),))
    study = study_of(asked(replace(nodes, **names, **values), gpus=4))
    one, two = study.machines.kinds
    lines = commands_of(study, Plan((Pool(PREFILL, one, 2), Pool(DECODE, two, 1)), 4, 4))
    assert lines[0].startswith("Run it on 1 host, with")
    found = made(lines)
    assert [each["kv_cache_memory_bytes"] for each in found["prefill"]] == [one.kv_cache_memory_bytes] * 2
    assert [each["kv_cache_memory_bytes"] for each in found["decode"]] == [two.kv_cache_memory_bytes]
