"""`splitserve doctor --save`: what of a cluster's timelines becomes of a profile, and the steps of a tiny model."""

import asyncio
import dataclasses
import json

import psutil
import pytest
from click.testing import CliRunner

from serving_core.settings import EngineSettings
from splitserve.cli import main
from splitserve.launch.models import LocalModel
from splitserve_bench.compare.contenders import SPLIT, ClusterContender, colocated
from splitserve_bench.crew import worker
from splitserve_bench.doctor import measure as saving
from splitserve_bench.doctor.measure import (
    LONE_OUTPUT_TOKENS,
    LONE_PROMPT_TOKENS,
    LONE_REQUESTS,
    MODULE,
    SHORT_REQUESTS,
    DoctorBench,
    alone_factor,
    control_of,
    few_of,
    measure_profile,
    node_sizes,
    profile_of,
    spread_of,
)
from splitserve_bench.doctor.steps import (
    ANSWERS,
    GO_ON,
    MEASURE,
    PROMPTS,
    StepFigures,
    StepTask,
    measure,
    usual_fastest,
)
from splitserve_bench.models import Shape, write_random_model
from splitserve_bench.serve.records import Outcome
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import NO_SPREAD, Grid, Spread, read_profile
from splitserve_bench.transfer import peer
from tests.effort import few
from tests.tiny_models import write_tokenizer
from tests.unit.splitserve_bench.simulate_kit import PROFILE, SIZES, request, step_s

TINY = Shape("LlamaForCausalLM", "llama", 48, 3, 4, 2, 12, 80, 260, 1024)
DEADLINE_S = 800.0
BLOCK_BYTES = 16 * 2 * 3 * 2 * 12 * 2  # tokens, K and V, layers, heads, head size, bytes of a bfloat16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(folder, TINY)
    return folder


def lone(first_s, tpot_s, *, queue_s, server_first_s, transfer_s, prefill_s=0.0):
    """One that was alone, with so many seconds at its client and in its timeline."""
    arrivals_s = tuple(first_s + index * tpot_s for index in range(LONE_OUTPUT_TOKENS))
    timeline = {
        "prefill_queue_s": queue_s,
        "prefill_s": prefill_s,
        "ttft_s": server_first_s,
        "kv_transfer_s": transfer_s,
    }
    counts = (1,) * LONE_OUTPUT_TOKENS
    return Outcome(0, 0.0, 0.0, LONE_PROMPT_TOKENS, len(counts), arrivals_s, counts, arrivals_s[-1], timeline=timeline)


def test_what_is_left_of_a_lone_request_is_overhead_and_control():
    """Of long requests it tells of a node's work around steps, of short ones of messages and the API server."""
    chunk_s = PROFILE.steps.prompts.at(LONE_PROMPT_TOKENS, 0)
    long, short = (
        [
            lone(
                0.1 + odd,
                step_s(1) + 0.002 + odd,
                queue_s=queue_s + odd,
                prefill_s=chunk_s + 0.012 + odd,
                server_first_s=0.093 + odd,
                transfer_s=0.004 + odd,
            )
            for odd in (0.0, -0.001, 0.5)
        ]
        for queue_s in (0.6, 0.006)
    )
    profile = profile_of("paper", 1, SIZES, PROFILE.steps, 5e8, long, [short[0]] * 9)
    assert profile.steps.overhead_s == pytest.approx(0.002)
    assert profile.steps.prompt_overhead_s == pytest.approx(0.010)
    assert profile.control.message_s == pytest.approx(0.003)
    assert profile.control.api_server_s == pytest.approx(0.007)
    assert (profile.kv_transfer.latency_s, profile.kv_transfer.bytes_per_s) == (pytest.approx(0.004), 5e8)


def short_one(queue_s, api_server_s):
    return lone(0.1 + api_server_s, 0.02, queue_s=queue_s, server_first_s=0.1, transfer_s=0.0)


def test_messages_and_the_api_server_spread_together_around_their_medians():
    """A quarter of them takes twice as long as the others."""
    control = control_of([short_one(0.006, 0.007)] * 60 + [short_one(0.012, 0.014)] * 20)
    assert (control.message_s, control.api_server_s) == (pytest.approx(0.003), pytest.approx(0.007))
    assert control.spread.at(0.5) == pytest.approx(1.0)
    assert control.spread.at(0.95) == pytest.approx(2.0)


def test_one_node_rests_while_the_other_one_works_for_a_lone_request():
    """So its steps are those of a node that is alone."""
    steps = dataclasses.replace(PROFILE.steps, answers_alone_factor=0.75, prompts_alone_factor=0.5)
    first_s = PROFILE.steps.prompts.at(LONE_PROMPT_TOKENS, 0) * 0.5 + 0.012
    outcome = lone(
        0.2, step_s(1) * 0.75 + 0.002, queue_s=0.006, prefill_s=first_s, server_first_s=0.193, transfer_s=0.0
    )
    found = profile_of("paper", 1, SIZES, steps, 5e8, [outcome], [outcome]).steps
    assert (found.overhead_s, found.prompt_overhead_s) == (pytest.approx(0.002), pytest.approx(0.010))
    assert (found.answers_alone_factor, found.prompts_alone_factor) == (0.75, 0.5)


@pytest.mark.parametrize(
    ("cpus", "cores", "contender", "given"),
    [
        ([0, 1], 1, ClusterContender("two nodes", SPLIT, 1, 1, 0), [0, 1]),
        ([2, 3, 5, 7, 9], 2, ClusterContender("two nodes", SPLIT, 1, 1, 0), [2, 3, 5, 7]),
        ([0, 1], 2, colocated(1, 2), [0, 1]),
        ([4, 6, 8], 2, colocated(1, 2), [4, 6]),
        ([], 3, colocated(1, 3), []),
    ],
)
async def test_lone_requests_go_to_nodes_of_as_many_cores_as_the_steps_were_measured_on(
    tiny, monkeypatch, cpus, cores, contender, given
):
    asked = []

    class Arena:
        def __init__(self, model, cores, flags, log_dir, report):
            self._asked = (model, list(cores))

        async def run(self, contender, warm_up, planned, *, max_concurrency, **_):
            asked.append((*self._asked, contender, len(planned), max_concurrency))
            return [lone(0.4, step_s(1), queue_s=0.0, server_first_s=0.3, transfer_s=0.0)] * len(planned)

    async def steps(prompts, answers, report, *, at_once):
        assert (answers.cpus, prompts.cpus) == saving.node_cpus(cpus, cores)[0][::-1]
        assert at_once == (contender.num_nodes == 2)
        return PROFILE.steps

    monkeypatch.setattr(saving, "Arena", Arena)
    monkeypatch.setattr(saving, "measure_steps", steps)
    monkeypatch.setattr(saving, "allowed_cpus", lambda: cpus)
    model = LocalModel(tiny, "tiny")
    settings = EngineSettings(quantization="w8a8", weights_memory_bytes=2**30, batch_invariant=True, num_kv_blocks=9)
    profile = await measure_profile(model, settings, DoctorBench(cores, 2, (16,), (8,), 1), 5e8, str)
    assert profile.flags == {"quantization": "w8a8", "weights_memory_bytes": 2**30, "batch_invariant": True}
    assert asked == [(model, given, contender, LONE_REQUESTS + SHORT_REQUESTS, 1)]
    assert (profile.cores, profile.kv_transfer.latency_s) == (cores, 0.0)


def test_the_share_that_steps_take_alone_is_the_median_of_a_few():
    """Of every second row up to the last one, with the fewest tokens before them."""
    task = StepTask({}, "", ANSWERS, (1, 2, 4, 8, 16), (32, 256), 3, 9)
    few = few_of(task)
    assert [task.num_equal(*place) for place in [(4, 32), (4, 256), (8, 32)]] == [9, 0, 0]
    assert few.num_spread == 0
    assert (few.rows, few.columns) == ((1, 4, 16), (32,))
    assert dataclasses.replace(few, rows=task.rows, columns=task.columns, num_spread=9) == task
    seconds = ((1.0, 9.0), (2.0, 9.0), (3.0, 9.0), (4.0, 9.0), (5.0, 9.0))
    beside = Grid(task.rows, task.columns, seconds)
    assert alone_factor(beside, few, StepFigures(((0.9,), (1.8,), (2.5,)))) == pytest.approx(0.6)
    assert alone_factor(beside, few, StepFigures(((1.1,), (9.0,), (2.5,)))) == 1.0


def test_noise_makes_no_time_negative():
    outcome = lone(0.1, step_s(1) - 0.01, queue_s=0.0, server_first_s=0.2, transfer_s=0.0)
    profile = profile_of("paper", 1, SIZES, PROFILE.steps, 5e8, [outcome], [outcome] * 2)
    assert (profile.steps.overhead_s, profile.steps.prompt_overhead_s, profile.control.api_server_s) == (0, 0, 0)


def test_the_sizes_of_a_node(tiny):
    sizes = node_sizes(tiny, EngineSettings(kv_cache_memory_bytes=10 * BLOCK_BYTES + 1, max_model_len=500))
    assert (sizes.num_blocks, sizes.block_size, sizes.block_bytes) == (10, 16, BLOCK_BYTES)
    assert (sizes.num_layers, sizes.vocab_size, sizes.max_model_len) == (3, 260, 500)
    assert node_sizes(tiny, EngineSettings()).max_model_len == 1024


@pytest.mark.parametrize("kv_cache_dtype", few(["auto", "int8"], "int8"))
def test_steps_of_a_tiny_model(tiny, kv_cache_dtype):
    settings = dataclasses.asdict(EngineSettings(model=str(tiny), device="cpu", kv_cache_dtype=kv_cache_dtype))
    answers, another_answer = measure(StepTask(settings, "", ANSWERS, (1, 3), (8, 40), 1, 20))
    prompts, another_chunk = measure(StepTask(settings, "", PROMPTS, (1, 5, 64), (0, 33), 1, 3))
    for _ in range(3):  # as often as the other node needs
        another_answer()
        another_chunk()
    assert [len(row) for row in answers.seconds] == [2, 2]
    assert [len(row) for row in prompts.seconds] == [2, 2, 2]
    assert all(seconds > 0 for row in (*answers.seconds, *prompts.seconds) for seconds in row)
    assert (len(answers.factors), len(prompts.factors)) == (32, 3)
    assert sum(answers.factors) == pytest.approx(32)  # of two rows of 16 steps, of which the grid has the mean
    assert sorted(prompts.factors)[1] == pytest.approx(1.0)


def test_more_samples_make_no_place_faster():
    """As a lucky one in a hundred would, on a machine that is mostly disturbed."""
    assert usual_fastest([3.0, 2.0, 4.0], 3) == 2.0
    assert usual_fastest([3.0, 2.0, 4.0, 2.5, 3.0, 2.5, 0.1, 3.0, 3.0, 9.0], 3) == 2.0
    assert usual_fastest([2.0, 2.0, 0.1, 2.0], 1) == 2.0


def test_a_spread_has_quantiles_of_the_factors():
    spread = spread_of([2.0 + index / 50 for index in range(-50, 51)])
    assert spread.shares == (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    assert spread.factors == pytest.approx([1.02, 1.1, 1.5, 2.0, 2.5, 2.9, 2.98])
    assert spread_of([]) == NO_SPREAD


def test_overheads_are_what_is_left_of_the_mean_of_a_spread():
    """Steps that take twice as long as the grids say leave nothing of overheads that seemed to be."""
    twice = Spread((0.5,), (2.0,))
    steps = dataclasses.replace(PROFILE.steps, answers_spread=twice, prompts_spread=twice)
    prefill_s = 2 * PROFILE.steps.prompts.at(LONE_PROMPT_TOKENS, 0) + 0.03
    outcome = lone(0.1, 2 * step_s(1) + 0.01, queue_s=0.0, prefill_s=prefill_s, server_first_s=0.2, transfer_s=0.0)
    found = profile_of("paper", 1, SIZES, steps, 5e8, [outcome], [outcome]).steps
    assert (found.overhead_s, found.prompt_overhead_s) == (pytest.approx(0.005), pytest.approx(0.010))


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "row"), [(PROMPTS, 8), (ANSWERS, 2)])
async def test_who_is_measured_first_goes_on_until_the_other_one_is(tiny, kind, row):
    """Else the other one would be measured beside a node that rests."""
    settings = dataclasses.asdict(EngineSettings(model=str(tiny), device="cpu"))
    task, others = StepTask(settings, "", kind, (row,), (8,), 1), set(psutil.Process().children())

    def started():
        return set(psutil.Process().children()) - others

    async with asyncio.timeout(DEADLINE_S), worker(MODULE, json.dumps(dataclasses.asdict(task)), "first") as first:
        await first.started()
        figures = await first.done(MEASURE)
        await first.begin(GO_ON)
        [node] = started()
        for _ in range(2):
            spent_s = cpu_s(node)
            while cpu_s(node) < spent_s + 0.1:
                await asyncio.sleep(0.01)
    assert [len(seconds) for seconds in figures["seconds"]] == [1]
    assert not started()


def cpu_s(process):
    """Of it and those that it has started."""
    with process.oneshot():
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@pytest.mark.nightly
@pytest.mark.parametrize("has_all_cores", [False, True], ids=["a node of one core", "a node of all cores"])
def test_the_command_saves_what_a_simulation_reads(tiny, tmp_path, monkeypatch, has_all_cores):
    """A node of all cores leaves none for a second one, so there is no KV transfer between two."""
    monkeypatch.setattr(peer, "DEADLINE_S", 600.0)  # its other process may take long to begin
    write_tokenizer(tiny)
    path, cores = tmp_path / "profile.json", len(saving.allowed_cpus()) if has_all_cores else 1
    words = ("--running", 2, "--prompt-tokens", 16, "--output-tokens", 8, "--repeats", 1, "--save", path, "--json")
    done = CliRunner().invoke(main, ["doctor", str(tiny), "--cores", str(cores), *map(str, words)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["model"] == "tiny"
    profile = read_profile(path)
    assert (profile.model, profile.cores, profile.node.vocab_size) == ("tiny", cores, 260)
    assert profile.kv_transfer.latency_s == 0.0 or not has_all_cores
    assert 0 < profile.steps.answers_alone_factor <= 1
    assert 0 < profile.steps.prompts_alone_factor <= 1
    assert len(profile.steps.prompts_spread.factors) == len(profile.control.spread.factors) == 7
    planned = [request(0, 40, 5)]
    (outcome,) = simulate(profile, FleetSize(1, 1), planned, max_concurrency=None, request_timeout_s=60.0).outcomes
    assert outcome.num_output_tokens == 5
