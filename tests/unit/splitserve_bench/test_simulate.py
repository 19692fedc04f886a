"""Simulated fleets: what requests take that are alone can be added up on paper; and the command."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.settings import CoordinatorSettings
from serving_core.errors import SettingsError
from serving_core.requests import Request, SamplingParams, Work
from splitserve.cli import main
from splitserve_bench.serve.metrics import PHASE_FIELDS
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.costs import ProfileCosts
from splitserve_bench.simulate.events import Agenda, ToyModel
from splitserve_bench.simulate.fleet import Fleet, FleetSize, LoadClients, simulate
from splitserve_bench.simulate.profile import Grid, TierProfile, TransferProfile, read_profile
from tests.effort import effort
from tests.tiny_models import write_tokenizer
from tests.unit.splitserve_bench.simulate_kit import (
    API_SERVER_S,
    BLOCK_BYTES,
    BLOCK_SIZE,
    BYTES_PER_S,
    LATENCY_S,
    MESSAGE_S,
    NUM_LAYERS,
    PROFILE,
    PROMPT_S,
    SIZES,
    VOCAB_SIZE,
    chunk_s,
    request,
    step_s,
)
from tests.unit.splitserve_bench.trace_kit import write_trace

SPLIT, COLOCATED = FleetSize(1, 1), FleetSize(0, 0, 1)
BLOCK_S = BLOCK_BYTES / BYTES_PER_S


def outcomes_of(size, *planned, **options):
    return simulate(PROFILE, size, planned, **{"max_concurrency": None, "request_timeout_s": 100.0, **options}).outcomes


def check_phases(outcome):
    """They are those of the coordinator, which sees the request between the two ways through the API server."""
    seconds = outcome.timeline
    phases = [seconds[name] for name in PHASE_FIELDS]
    assert (
        sum(phases) == pytest.approx(seconds["e2e_s"]) == pytest.approx(outcome.ended_s - outcome.sent_s - API_SERVER_S)
    )


def test_requests_with_limits_tell_what_was_expected_of_them():
    """The second prompt takes longer than its first token may."""
    load = [replace(request(0, 500, 4), ttft_ms=2000.0), replace(request(1, 500, 4, at_s=0.1), ttft_ms=300.0)]
    taken, refused = outcomes_of(FleetSize(0, 0, 1, admission="timely"), *load)
    assert taken.timeline["expected_ttft_s"] == pytest.approx(taken.timeline["ttft_s"], rel=0.1)
    assert taken.timeline["ttft_margin_s"] == pytest.approx(0.2), "a tenth"
    assert (taken.timeline["deferred_s"], taken.timeline["is_late"]) == (0.0, 0.0)
    assert refused.is_refused
    assert refused.timeline["expected_ttft_s"] > chunk_s(500)
    assert refused.timeline["deferred_s"] == 0.0
    assert "prefill_queue_s" not in refused.timeline, "no node had it"


def test_a_lone_request_where_both_is_done():
    (outcome,) = outcomes_of(COLOCATED, request(0, 100, 4))
    first_s = API_SERVER_S + 2 * MESSAGE_S + chunk_s(100)
    assert outcome.arrivals_s == pytest.approx([first_s + index * step_s(1) for index in range(4)])
    assert outcome.ended_s == pytest.approx(outcome.arrivals_s[-1])
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.error) == (100, 4, "")
    check_phases(outcome)


def test_a_long_prompt_takes_several_steps():
    (outcome,) = outcomes_of(COLOCATED, request(0, 1030, 1))
    assert outcome.arrivals_s == pytest.approx([API_SERVER_S + 2 * MESSAGE_S + 2 * chunk_s(512) + chunk_s(6)])


@pytest.mark.parametrize("num_waiting", [1, 3])
def test_only_the_first_of_a_row_of_chunks_finds_a_node_that_waits(num_waiting):
    """What is measured with requests that are alone is no cost of those behind each other."""
    slow = replace(PROFILE, steps=replace(PROFILE.steps, prompt_overhead_s=0.050))
    planned = [request(index, 1030, 1) for index in range(num_waiting)]
    *_, last = simulate(slow, COLOCATED, planned, max_concurrency=None, request_timeout_s=100.0).outcomes
    all_s = chunk_s(1030 * num_waiting) + PROMPT_S * (-(-1030 * num_waiting // 512) - 1)  # each chunk has what it can
    assert last.arrivals_s == pytest.approx([API_SERVER_S + 2 * MESSAGE_S + 0.050 + all_s])


def test_a_lone_request_of_two_nodes():
    """The descriptor is there before the prompt is read, so all but the last layer of its blocks has left by then."""
    (outcome,) = outcomes_of(SPLIT, request(0, 100, 3))
    first_s = API_SERVER_S + 2 * MESSAGE_S + chunk_s(100)
    transfer_s = 7 * BLOCK_S / NUM_LAYERS + LATENCY_S
    second_s = first_s + transfer_s + step_s(1)
    assert outcome.arrivals_s == pytest.approx([first_s, second_s, second_s + step_s(1)])
    assert outcome.timeline["kv_transfer_s"] == pytest.approx(transfer_s)
    check_phases(outcome)


def test_blocks_of_a_short_prompt_leave_at_its_end():
    (outcome,) = outcomes_of(SPLIT, request(0, BLOCK_SIZE - 1, 2))
    assert outcome.arrivals_s[1] - outcome.arrivals_s[0] == pytest.approx(BLOCK_S + LATENCY_S + step_s(1))


def test_prompts_that_are_read_together_leave_one_after_the_other():
    planned = [request(0, BLOCK_SIZE - 1, 2), request(1, BLOCK_SIZE - 1, 2)]
    first, second = outcomes_of(SPLIT, *planned)
    assert first.arrivals_s[0] == second.arrivals_s[0]
    assert first.timeline["kv_transfer_s"] == pytest.approx(BLOCK_S + LATENCY_S)
    assert second.timeline["kv_transfer_s"] == pytest.approx(2 * BLOCK_S + LATENCY_S)


def test_what_was_read_before_is_not_read_again():
    again = request(0, 101, 2)
    later = type(again)(1, 10.0, again.prompt, 2)
    first, second = outcomes_of(SPLIT, again, later)
    assert first.timeline["prefill_s"] == pytest.approx(chunk_s(101))
    assert second.timeline["prefill_s"] == pytest.approx(chunk_s(101 - 6 * BLOCK_SIZE))


def _continued(prompt, num_tokens):
    """The prompt with so many tokens behind it."""
    text = Request("", 0, list(prompt), len(prompt), SamplingParams(max_tokens=num_tokens))
    for _ in range(num_tokens):
        work = Work(text, len(text.token_ids) - 1, 1, ())
        text.token_ids += [token.token_id for token in ToyModel(VOCAB_SIZE).next_tokens([work])]
    return text.token_ids


def chats(count, profile=PROFILE, size=SPLIT, every_s=20.0, num_tokens=100):
    """What becomes of the second turns, of which one comes every 20 s. A first one leaves 160 tokens where it was
    written and 96 where it was read; or as many more as it has more than 100."""
    firsts = [request(chat, num_tokens, 61, at_s=chat * every_s) for chat in range(count)]
    texts = [_continued(each.prompt, 61) for each in firsts]
    seconds = [
        PlannedRequest(count + chat, 20.0 * chat + 10.0, (*text, *range(19)), 2) for chat, text in enumerate(texts)
    ]
    outcomes = simulate(profile, size, [*firsts, *seconds], max_concurrency=None, request_timeout_s=100.0).outcomes
    return outcomes[count:]


def test_a_turn_is_lent_what_the_answer_before_has_left_where_that_is_faster_than_computing_it():
    """Four blocks that travel take 4 ms, and 64 tokens that are computed 64."""
    (lent,), (computed,) = chats(1), chats(1, size=replace(SPLIT, remote_prefix_fetch="never"))
    assert computed.timeline["prefill_s"] == pytest.approx(chunk_s(180 - 96))
    assert lent.timeline["prefill_s"] == pytest.approx(chunk_s(180 - 160))
    prefix_fetch_s = 2 * MESSAGE_S + 4 * BLOCK_S + LATENCY_S
    assert lent.timeline["prefix_fetch_s"] == pytest.approx(prefix_fetch_s)
    assert lent.arrivals_s[0] - 10.0 == pytest.approx(API_SERVER_S + 2 * MESSAGE_S + prefix_fetch_s + chunk_s(20))
    check_phases(lent)


def test_prefix_fetches_that_take_longer_than_computing_end_when_that_has_been_measured():
    """What is not there in time is computed after all: the least patience is 250 ms."""
    slow = replace(PROFILE, kv_transfer=TransferProfile(LATENCY_S, BLOCK_BYTES / 0.1))
    turns = chats(5, slow)
    assert [each.error for each in turns] == [""] * 5
    assert [each.timeline["prefix_fetch_s"] for each in turns] == pytest.approx([0.25] * 3 + [0.0] * 2)
    assert [each.timeline["prefill_s"] for each in turns] == pytest.approx([chunk_s(180 - 96)] * 5)


def test_a_long_turn_is_appended_on_the_decode_node_that_holds_the_one_before():
    """Of 676 tokens it holds 656. The prefill node would compute 84, or fetch four blocks first."""
    (turn,) = chats(1, num_tokens=596)
    assert turn.timeline["prefill_s"] == pytest.approx(chunk_s(676 - 656))
    assert turn.arrivals_s[0] - 10.0 == pytest.approx(API_SERVER_S + 2 * MESSAGE_S + chunk_s(20))
    assert turn.timeline["prefix_fetch_s"] == turn.timeline["kv_transfer_s"] == 0.0
    check_phases(turn)


def test_a_turn_goes_where_its_beginning_is():
    """The first turns come at once, so each of two nodes has one of them; nothing has to travel."""
    for turn in chats(2, size=FleetSize(0, 0, 2), every_s=0.0):
        assert turn.timeline["prefill_s"] == pytest.approx(chunk_s(180 - 160))
        assert turn.timeline["prefix_fetch_s"] == 0.0


@pytest.mark.parametrize(("num_host", "num_disk", "read_s"), [(8, 0, 0.006), (0, 8, 0.024), (2, 6, 0.018)])
def test_what_the_pool_gave_up_is_read_back_where_that_is_faster_than_computing_it(num_host, num_disk, read_s):
    """A pool of 10 blocks gives up the six of the first prompt for the second one's."""
    tier = TierProfile(num_host, num_disk, host_block_s=0.001, disk_block_s=0.004)
    small = replace(PROFILE, node=replace(SIZES, num_blocks=10, tier=tier))
    first, other = request(0, 98, 2), request(1, 150, 2, at_s=5.0)
    planned = [first, other, replace(first, index=2, send_at_s=10.0)]
    played = simulate(small, COLOCATED, planned, max_concurrency=None, request_timeout_s=100.0)
    *_, again = played.outcomes
    assert again.timeline["prefill_s"] == pytest.approx(chunk_s(2))
    assert again.timeline["prefill_queue_s"] == pytest.approx(2 * MESSAGE_S + read_s)
    assert [each.num_cached_tokens for each in played.outcomes] == [0, 0, 6 * BLOCK_SIZE]
    assert (played.tier.num_hits, played.tier.num_misses, played.tier.block_tokens) == (6, 6 + 9, BLOCK_SIZE)
    assert played.tier.read_s == pytest.approx(read_s)
    assert played.tier.saved_s > 0


def test_a_profile_may_have_kv_offload(tmp_path):
    profile = replace(PROFILE, node=replace(SIZES, tier=TierProfile(5, 7, 0.001, 0.002)))
    profile.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_answers_beside_each_other_share_their_steps():
    outcomes = outcomes_of(COLOCATED, *(request(index, 20, 30) for index in range(4)))
    for outcome in outcomes:
        assert outcome.arrivals_s[-1] - outcome.arrivals_s[-2] == pytest.approx(step_s(4))


def test_a_limit_on_what_runs_at_once():
    first, second = outcomes_of(COLOCATED, request(0, 20, 3), request(1, 20, 3), max_concurrency=1)
    assert second.sent_s == first.ended_s


def test_an_answer_that_takes_too_long_is_a_miss():
    (outcome,) = outcomes_of(COLOCATED, request(0, 20, 3000), request_timeout_s=1.0)
    assert outcome.error
    assert not outcome.is_refused
    assert 0 < outcome.num_output_tokens < 3000


def test_what_no_node_can_hold_is_refused():
    small = FleetSize(1, 1)
    outcome, other = outcomes_of(small, request(0, 4000, 200), request(1, 20, 2))
    assert (outcome.is_refused, other.error) == (True, "")


def test_each_node_has_its_part_in_a_large_fleet():
    num_nodes = effort(8, 32, 32)
    planned = [request(index, 64, 20, index * 0.032 / num_nodes) for index in range(8 * num_nodes)]
    outcomes = outcomes_of(FleetSize(num_nodes, num_nodes), *planned)
    assert all(not outcome.error for outcome in outcomes)
    assert max(outcome.ended_s - outcome.sent_s for outcome in outcomes) < 2 * min(
        outcome.ended_s - outcome.sent_s for outcome in outcomes
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [((0, 0, 0), "not 0"), ((1, 0, 0), "1P cannot"), ((0, 2, 0), "2D cannot"), ((9, 0, 1024), "1033")],
)
def test_fleets_that_could_not_answer(size, words):
    with pytest.raises(SettingsError, match=words):
        FleetSize(*size).check()


class StuckOnce(ProfileCosts):
    """Its first step takes longer than the coordinator waits."""

    is_stuck = True

    def step_s(self, load):
        self.is_stuck, was_stuck = False, self.is_stuck
        return 500.0 if was_stuck else super().step_s(load)


def test_a_node_that_is_stuck_is_given_up_and_comes_back():
    agenda, model = Agenda(), ToyModel(VOCAB_SIZE)
    planned = [request(0, 20, 3), request(1, 20, 3, at_s=600.0)]
    limits = {"max_concurrency": None, "request_timeout_s": 1000.0, "api_server_s": 0.0}
    clients = LoadClients(agenda, planned, model=model, **limits)
    fleet = Fleet(agenda, clients, PROFILE.node, model)
    fleet.start("a", "mixed", StuckOnce(PROFILE))
    fleet.start("b", "mixed", ProfileCosts(PROFILE))
    clients.start(fleet.coordinator)
    agenda.run(lambda: clients.is_over)
    first, second = clients.outcomes
    assert (first.error, second.error) == ("", "")
    assert CoordinatorSettings().step_timeout_s < first.ended_s < CoordinatorSettings().step_timeout_s + 5
    assert second.ended_s < 601
    assert [node.name for node in fleet.coordinator.registry.nodes] == ["a", "b"]
    assert fleet.coordinator.registry.named("a").session == 3  # it came back once, when the step had ended


# ---- the command ----


@pytest.fixture
def profile(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def run(profile, *words):
    return CliRunner().invoke(main, ["simulate", "--profile", profile, *map(str, words)])


LOAD = ("--num-prompts", 20, "--random-input-len", 50, "--random-output-len", 10, "--goodput", "ttft:200 tpot:30")


def test_the_same_seed_gives_the_same_bytes(profile):
    words = ("--prefill", 2, "--decode", 2, *LOAD, "--num-prompts", 8, "--request-rate", "5,50")
    words += ("--json", "--save-detailed", "--result-dir")
    first, second = run(profile, *words, profile + ".a"), run(profile, *words, profile + ".b")
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    other = run(profile, *words, profile + ".c", "--seed", 1)
    assert other.stdout != first.stdout


def test_a_trace_that_has_less_than_was_asked_for_is_told(profile, tmp_path):
    trace = write_trace(tmp_path / "trace.csv", 9, prompt_tokens=20, answer_tokens=5)
    words = ("--mixed", 1, "--dataset-name", "azure", "--dataset-path", trace, "--num-prompts")
    assert "the data set has 9 requests, not the 10 of --num-prompts" in run(profile, *words, 10).stderr
    assert "the data set has" not in run(profile, *words, 9).stderr


def test_texts_have_the_lengths_that_a_tokenizer_tells(profile, tmp_path):
    write_tokenizer(tmp_path)  # a token for each byte
    rows = [{"prompt": "ä" * 15, "output_tokens": 4}, {"prompt": "b" * 20, "output_tokens": 6}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--dataset-name", "custom", "--dataset-path", tmp_path / "prompts.jsonl", "--tokenizer", tmp_path)
    words += ("--skip-chat-template",)
    done = run(profile, "--mixed", 1, *words, "--json")
    result = json.loads(done.stdout)
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (2, 50, 10)


def test_only_the_same_simulation_is_saved_where_another_one_was(profile, tmp_path):
    words = ("--mixed", 1, *LOAD, "--num-prompts", 3, "--request-rate", 5, "--save-result", "--result-dir", tmp_path)
    others = [(), ("--seed", 1), ("--no-send-limits",), ("--request-timeout-s", 9), ("--goodput", "ttft:300")]
    for num, more in enumerate((*others, ())):
        assert run(profile, *words, *more).exit_code == 0
        saved = sorted(tmp_path.glob("simulated-1B-5.0qps-paper-*.json"))
        assert len(saved) == min(num + 1, len(others))


def test_it_says_what_bench_serve_says(profile):
    done = run(profile, "--mixed", 1, *LOAD, "--request-rate", "5,500", "--json")
    assert done.exit_code == 0, done.output
    slow, fast = map(json.loads, done.stdout.splitlines())
    assert (slow["request_rate"], fast["request_rate"]) == (5, 500)
    assert slow["completed"] == fast["completed"] == 20
    assert slow["total_output_tokens"] == 200
    assert slow["slo_attainment"] >= fast["slo_attainment"]
    assert slow["median_ttft_ms"] < fast["median_ttft_ms"]
    text = run(profile, "--mixed", 1, *LOAD, "--request-rate", 5)
    assert "attainment" in text.stdout


def test_it_tells_what_kv_offload_does(tmp_path):
    tier = TierProfile(64, 0, 0.001, 0.001)
    path = str(tmp_path / "tier.json")
    replace(PROFILE, node=replace(SIZES, num_blocks=16, tier=tier)).save(Path(path))
    trace = tmp_path / "trace.jsonl"
    ids = [0, 1, 0, 1]
    lines = [
        {"timestamp": 9000 * at, "input_length": 250, "output_length": 2, "hash_ids": [ids[at]]} for at in range(4)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = ("--mixed", 1, "--dataset-name", "mooncake", "--dataset-path", trace)
    result = json.loads(run(path, *load, "--json").stdout)
    assert result["cached_share"] == result["tier"]["read_share"] == 2 * 15 * 16 / (4 * 250)
    assert (result["tier"]["num_hits"], result["tier"]["hit_rate"]) == (30, 0.5)
    assert "KV offload: 30 blocks loaded, 50.0% of those" in " ".join(run(path, *load).stdout.split())


def test_prompts_that_take_no_time_are_read_at_once(tmp_path):
    steps = replace(PROFILE.steps, prompts=Grid((1.0,), (0.0,), ((0.0,),)))
    path = str(tmp_path / "free.json")
    replace(PROFILE, steps=steps).save(Path(path))
    result = json.loads(run(path, "--mixed", 1, *LOAD, "--request-rate", 0.1, "--json").stdout)
    assert result["median_ttft_ms"] == pytest.approx((API_SERVER_S + 2 * MESSAGE_S) * 1e3, rel=1e-3)


def test_how_fast_it_was_is_told_beside_the_result(profile):
    done = run(profile, "--mixed", 1, *LOAD, "--request-rate", 5)
    assert re.search(r"^200 output tokens simulated in [0-9.]+ s, [0-9]+ a second$", done.stderr, re.MULTILINE)
    assert "simulated in" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prefill", 1), "cannot answer"),
        (("--mixed", 1, "--request-rate", "0"), "above 0"),
        (("--mixed", 1, "--request-rate", "1,2", "--plots", "there"), "one --request-rate"),
        (("--mixed", 1, "--dataset-name", "azure"), "--dataset-path"),
        (("--mixed", 1, "--dataset-name", "custom", "--dataset-path", __file__), "--tokenizer FOLDER"),
    ],
)
def test_what_cannot_be_simulated(profile, words, said):
    done = run(profile, *words)
    assert done.exit_code == 2
    assert said in done.output
