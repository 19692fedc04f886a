"""Which new requests are admitted: what their deadlines are planned with, over random fleets and loads; how long they
wait at most, and when the refused ones are to come back."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.control.admission import (
    FEWEST_FIRST_TOKENS,
    FEWEST_TOKENS,
    LATE_FLOOR,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    MOST_SPARE,
    NUM_RETRIES_MEASURED,
    Admission,
)
from coordinator.control.load import Ledger, Prompt
from coordinator.control.placement.costs import TransferEstimates, Wanted
from coordinator.control.placement.policy import POLICIES, Placed
from coordinator.control.request import Request, Timeline
from coordinator.control.slo import Slo
from serving_core.errors import RequestError
from serving_core.requests import LAST, Pooling, SamplingParams
from serving_core.slo import WINDOW, Due
from tests import fleet_events as events
from tests.effort import effort
from tests.unit.coordinator.placement_kit import NOW, TOKENS, Fleet
from tests.unit.coordinator.scheduler_kit import PROMPT, World

NUM_SEEDS = effort(300, 1000, 3000)
LENGTH = events.LENGTH


FULL = Placed(None, None, is_full=True)


def admission(*, admits_late=False, max_queue_wait_s=0.0):
    return Admission(Ledger(), admits_late=admits_late, max_queue_wait_s=max_queue_wait_s)


def tracked(slo, *, max_tokens=10, now=NOW):
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request("r/0", 1, Prompt(TOKENS), sampling, now + 1000.0, Timeline(now), slo)


def teach(found, late_share):
    """First tokens have come later than was expected, by this share of their limits."""
    for _ in range(WINDOW):
        request = tracked(Slo("", 2.0, None))
        request.predicted_first_s = NOW
        found.first_token(request, 0, NOW + 2.0 * late_share)


def write(found, tpot_s, *, limit_s, num_tokens=FEWEST_TOKENS):
    """Answers that were planned to keep their limit end, and their tokens came so far apart."""
    for _ in range(WINDOW):
        request = tracked(Slo("", None, limit_s))
        request.predicted_first_s = NOW
        for index in range(num_tokens):
            request.timeline.tokens(NOW + index * tpot_s)
            request.output.append(index)
        found.ended(request, NOW)


# ---- planned deadlines ----


def test_a_new_coordinator_spares_a_tenth_of_the_time_to_the_first_token():
    planned = admission().planned_due(tracked(Slo("", 4.0, 0.05)))
    assert (planned.first_s, planned.tpot_s) == (pytest.approx(NOW + 3.6), 0.05)
    assert admission().planned_due(tracked(Slo("", None, 0.05))) == Due(tpot_s=0.05)
    assert admission().planned_due(tracked(None)) is None
    assert admission().planned_due(tracked(Slo("", priority=3))) is None


@pytest.mark.parametrize(
    ("late_share", "spared"), [(-0.3, 0.0), (0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (3.0, MOST_SPARE)]
)
def test_it_learns_how_much_later_first_tokens_come_than_was_expected(late_share, spared):
    found = admission()
    teach(found, late_share)
    assert found.planned_due(tracked(Slo("", 4.0, None))).first_s == pytest.approx(NOW + 4.0 * (1 - spared))


def test_who_was_not_expected_in_time_says_nothing_of_that():
    found = admission()
    for _ in range(WINDOW):
        found.first_token(tracked(Slo("", 2.0, None)), 0, NOW + 100.0)
    assert found.planned_due(tracked(Slo("", 4.0, None))).first_s == pytest.approx(NOW + 3.6)


@pytest.mark.parametrize(("refused_s", "spared"), [(0.0, 0.25), (1.0, 0.25), (2.2, 0.3), (9.0, MOST_SPARE)])
def test_a_node_that_refuses_a_late_one_has_been_late(refused_s, spared):
    """By 5 % of the limit at least: 2.1 s, where 1.6 s were expected, of 2 s."""
    found = admission()
    for _ in range(WINDOW):
        request = tracked(Slo("", 2.0, None))
        request.predicted_first_s = NOW + 1.6
        found.refused_late(request, NOW + refused_s)
    assert found.planned_due(tracked(Slo("", 4.0, None))).first_s == pytest.approx(NOW + 4.0 * (1 - spared))


def test_a_limit_on_tpot_is_planned_for_as_the_part_that_was_kept_so_far():
    found = admission()
    write(found, 0.06, limit_s=0.05)
    assert found.tpot_margin == pytest.approx(1.2)
    write(found, 5.0, limit_s=0.05)
    assert found.tpot_margin == 1 + MOST_SPARE


def test_an_answer_of_few_tokens_says_nothing_of_tpot():
    found = admission()
    write(found, 5.0, limit_s=0.05, num_tokens=FEWEST_TOKENS - 1)
    assert found.tpot_margin == 1.0


def test_a_prompt_that_has_time_is_predicted_for_when_it_is_planned():
    """Others that go before it until then make no prediction wrong, so the margin learns nothing from them."""
    found, request = admission(), tracked(Slo("", 2.0, None))
    found.predict(request, Placed(None, None, begins_s=0.2, least_prefill_s=0.2), NOW)
    assert request.predicted_first_s == found.planned_due(request).first_s == pytest.approx(NOW + 1.8)
    without = tracked(Slo("", None, 0.05))
    found.predict(without, Placed(None, None, begins_s=0.2, least_prefill_s=0.2), NOW)
    assert without.predicted_first_s == pytest.approx(NOW + 0.2)


def test_late_ones_are_planned_without_a_first_token_and_those_that_have_it_as_they_are():
    found = admission()
    late, goes_on = tracked(Slo("", 4.0, 0.05)), tracked(Slo("", 4.0, 0.05))
    late.is_late = True
    goes_on.output.append(1)
    assert found.planned_due(late) == Due(tpot_s=0.05)
    assert found.planned_due(goes_on) == goes_on.due


# ---- who is admitted ----


def decide(fleet, slo, *, late_share=0.0, num_tokens=10, found=None):
    """Whether the request may begin, and where it would."""
    if found is None:
        found = admission()
        teach(found, late_share)
    request = tracked(slo, max_tokens=num_tokens)
    due = found.planned_due(request)
    wanted = Wanted(request.prompt, request.max_tokens, due=due, tpot_margin=found.tpot_margin)
    costs = TransferEstimates(0.0, 0.001)
    placed = POLICIES["auto"].place(fleet.registry.nodes, fleet.ledger, wanted, costs, NOW)
    return found.keeps_slos(request, placed, NOW), placed


MARGIN = 1.3  # of all that is, so that nobody is late before: who is late anyway does not count


def a_load(rng):
    """Of two nodes, one of which reads: prompts and answers that are in time, even with the margin. There is no other
    place to choose, and all answers count as written at one time, however long the reading takes."""
    work_s, prompts = 0.0, []
    for _ in range(rng.randrange(5)):
        num_tokens = rng.randint(1, 500)
        work_s += MARGIN * (0.010 + num_tokens * 0.001)
        prompts.append((num_tokens, work_s * rng.uniform(1.01, 1.5), rng.random() < 0.5))
    num_sequences, num_free = rng.randrange(6), rng.randrange(3)
    step_s = MARGIN * (0.010 + 0.002 * (num_sequences + num_free + len(prompts)))
    answers = [(step_s * rng.uniform(1.01, 1.5), rng.randint(1, 300)) for _ in range(num_sequences)]
    return prompts, answers, step_s * rng.uniform(1.01, 1.5), num_free


def fleet_of(load, margin=1.0):
    prompts, answers, tpot_s, num_free = load
    fleet = Fleet()
    p0, d0 = fleet.add("p0", margin=margin), fleet.add("d0", margin=margin)
    for num_tokens, due_in_s, is_limited in prompts:
        fleet.reads(p0, num_tokens, due_in_s, d0, tpot_s if is_limited else 1.0)
    for limit_s, num_left in answers:
        fleet.writes(d0, limit_s, num_left=num_left)
    for _ in range(num_free):
        fleet.writes(d0)
    return fleet


def a_newcomer(rng):
    tpot_s = rng.choice([None, rng.uniform(0.012, 0.04)])
    return Slo("", rng.uniform(0.1, 2.0) if tpot_s is None else rng.choice([None, rng.uniform(0.1, 2.0)]), tpot_s)


@pytest.mark.parametrize("what", ["steps", "first tokens"])
def test_a_wider_spread_of_errors_never_admits_more(what):
    margin = MARGIN if what == "steps" else 1.0
    late_share = 0.3 if what == "first tokens" else 0.0
    num_admitted = num_fewer = 0
    for seed in range(NUM_SEEDS):
        rng = Random(seed)
        load, slo, num_tokens = a_load(rng), a_newcomer(rng), rng.choice([2, 10, 300])
        is_admitted, _ = decide(fleet_of(load), slo, num_tokens=num_tokens)
        is_still, placed = decide(fleet_of(load, margin), slo, late_share=late_share, num_tokens=num_tokens)
        assert is_admitted or not is_still, f"seed {seed}: {placed}"
        num_admitted, num_fewer = num_admitted + is_admitted, num_fewer + (is_admitted and not is_still)
    assert NUM_SEEDS // 5 < num_admitted < NUM_SEEDS * 9 // 10, "the loads tell both"
    assert num_fewer > NUM_SEEDS // 100


def more(load, rng):
    """The load with one more prompt or answer, which is in time itself."""
    prompts, answers, tpot_s, num_free = load
    match rng.randrange(3):
        case 0:
            work_s = sum(0.010 + num_tokens * 0.001 for num_tokens, *_ in prompts)
            num_tokens = rng.randint(1, 500)
            due_in_s = (work_s + 0.010 + num_tokens * 0.001) * rng.uniform(1.01, 1.5)
            return [*prompts, (num_tokens, due_in_s, rng.random() < 0.5)], answers, tpot_s, num_free
        case 1:
            return prompts, [*answers, (rng.uniform(0.013, 0.06), rng.randint(1, 300))], tpot_s, num_free
    return prompts, answers, tpot_s, num_free + 1


def test_more_load_never_admits_who_was_refused():
    num_refused = num_more = 0
    for seed in range(NUM_SEEDS):
        rng = Random(seed)
        load, slo, num_tokens = a_load(rng), a_newcomer(rng), rng.choice([2, 10, 300])
        is_admitted, _ = decide(fleet_of(load), slo, num_tokens=num_tokens)
        is_still, placed = decide(fleet_of(more(load, rng)), slo, num_tokens=num_tokens)
        assert is_admitted or not is_still, f"seed {seed}: {placed}"
        num_refused, num_more = num_refused + (not is_admitted), num_more + (is_admitted and not is_still)
    assert num_refused > NUM_SEEDS // 8, "the loads tell both"
    assert num_more > NUM_SEEDS // 50


def test_who_could_be_in_time_somewhere_is_not_refused_for_where_it_would_cost_less():
    """b0 writes an answer for which two are too many: 14 ms of 13. b1 reads, and has time for both."""
    fleet = Fleet()
    b0, b1 = fleet.add("b0"), fleet.add("b1")
    fleet.writes(b0, 0.013, num_output=1000, ago_s=1.0, num_left=10)  # 12 s ahead: long steps do it no harm
    fleet.reads(b1, 300)
    assert fleet.late(b0, Due(NOW + 5.0)).tpot_ratio(0.11) > 1
    assert fleet.late(b1, Due(NOW + 5.0)).late_by_both(0.0) == 0
    assert not fleet.late(b1, Due(NOW + 5.0)).is_own_late
    assert decide(fleet, Slo("", 5.0, None))[0]


def test_answers_whose_limit_is_planned_shorter_than_a_step_still_count():
    """A step of one takes 12 ms, of 12.4. One more in each is late by 1.6 ms a token, however much is spared."""
    for tpot_s in (0.0120, 0.0130):  # that was kept of 12.4 ms, in the mean
        fleet, found = Fleet(), admission()
        d0 = fleet.add("b0")
        write(found, tpot_s, limit_s=0.0124)
        fleet.writes(d0, 0.0124)
        assert not decide(fleet, Slo("", None, 0.1), num_tokens=300, found=found)[0], tpot_s


# ---- when the refused ones are to come back ----


def wait_of(error):
    wait_s = float(error.metadata["retry_after_s"])
    assert float(str(error).split()[-2]) == pytest.approx(wait_s, abs=0.051), "which the message rounds"
    return wait_s


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=30), st.floats(0.1, 10.0))
def test_the_refused_come_back_one_after_the_other_at_the_pace_of_endings(gaps_s, every_s):
    found, now = admission(), NOW
    for number in range(4):
        found.ended(tracked(None), NOW - (3 - number) * every_s)
    turns_s = []
    for gap_s in gaps_s:
        now += gap_s
        wait_s = wait_of(found.refusal("QUEUE_FULL", "full", now))
        assert MIN_RETRY_AFTER_S - 1e-3 <= wait_s <= MAX_RETRY_AFTER_S + 1e-3
        turns_s.append(now + wait_s)
        if wait_s < MAX_RETRY_AFTER_S - 1e-3 and len(turns_s) > 1:
            assert turns_s[-1] > turns_s[-2] or wait_s == pytest.approx(MIN_RETRY_AFTER_S, abs=1e-3)
    assert all(later_s >= earlier_s - 1e-3 for earlier_s, later_s in pairwise(turns_s)), "nobody overtakes"


def test_who_would_be_late_for_long_comes_back_after_that_and_keeps_nobody_waiting():
    found = admission()
    assert wait_of(found.refusal("WOULD_BE_LATE", "late", NOW, 50.0)) == 50.0
    assert wait_of(found.refusal("WOULD_BE_LATE", "late", NOW)) == MIN_RETRY_AFTER_S


def prompted(number, slo=None, now=NOW):
    """One with a prompt of its own."""
    prompt = Prompt([number, *TOKENS])
    return Request(f"{number}/0", 1, prompt, SamplingParams(max_tokens=10), now + 1000.0, Timeline(now), slo)


def test_whoever_comes_leaves_time_and_a_slot_for_those_who_were_told_to_come():
    """An answer ends each second, and whoever is refused comes back a second later. One that reads 3 s of 4, of which a
    tenth is spared, has no second left for another."""
    found, slo, node = admission(), Slo("", 4.0, None), Fleet().add("b0")
    placed = Placed(node, node, least_prefill_s=3.0)
    for number in range(NUM_RETRIES_MEASURED):
        now = NOW + number
        found.ended(tracked(None), now)
        told, new = prompted(number, slo, now), prompted(-1, slo, now)
        assert not found.is_hopeless(new, placed, now)
        assert found.num_spare(new, now) == 0
        found.refusal("WOULD_BE_LATE", "late", now, 1.0, told)
        assert found.is_hopeless(new, placed, now) == (number > 0.6 * NUM_RETRIES_MEASURED), "few have come back yet"
        found.arrived(told, now + 1.0)
        assert told.came_back
    found.refusal("WOULD_BE_LATE", "late", now, 1.0, told)
    now += 1.0
    told, new = prompted(NUM_RETRIES_MEASURED - 1, slo, now), prompted(-1, slo, now)
    assert found.num_spare(new, now) == 1
    found.arrived(new, now)
    assert not new.came_back
    found.arrived(told, now)
    assert found.num_spare(told, now) == 0
    assert not found.is_hopeless(told, placed, now)


# ---- the longest wait ----


def learn(world, name, **told):
    world.registry.heartbeat(world.registry.find(name), events.heartbeat(**told).heartbeat, 0.0)


def slow_world(**settings):
    """p0 reads a token a second, and a prompt has three."""
    world = World(("p0", "d0"), max_live=100, **settings)
    learn(world, "p0", prefill_tokens_per_s=1.0)
    return world


@pytest.mark.parametrize("admits_late", [True, False])
def test_who_would_wait_longer_than_the_server_lets_is_refused_when_it_comes(admits_late):
    world = slow_world(admits_late=admits_late, max_queue_wait_s=7.0)
    for number in range(3):  # behind 0 s, 3 s and 6 s
        assert world.submit(f"{number}/0") == ["reserve d0", "prefill p0"]
    with pytest.raises(RequestError, match=r"after 9\.0 s, the limit is 7 s: try again in 2\.0 s") as refusal:
        world.submit("r/0")
    assert refusal.value.reason == "QUEUE_FULL"
    assert wait_of(refusal.value) == pytest.approx(9.0 - 7.0)
    assert world.scheduler.num_open == 3


def test_who_is_in_time_is_not_refused_for_the_longest_wait():
    """12 s of 20, of which a tenth is spared."""
    world = slow_world(admits_late=False, max_queue_wait_s=7.0)
    for number in range(3):
        world.submit(f"{number}/0", slo=Slo("", 20.0, None))
    assert world.submit("r/0", slo=Slo("", 20.0, None)) == ["reserve d0", "prefill p0"]


def test_a_late_request_waits_no_longer_than_the_server_lets_either():
    """It could have its first token at 6 s, and is due at 3 s."""
    world = slow_world(max_queue_wait_s=2.0)
    world.submit("first/0")
    with pytest.raises(RequestError, match=r"after 3\.0 s, the limit is 2 s: try again in 1\.0 s"):
        world.submit("r/0", slo=Slo("", 3.0, None))
    assert (world.scheduler.num_open, world.scheduler.num_deferred) == (1, 0)


def test_one_that_was_deferred_in_vain_waits_no_longer_than_the_server_lets_either():
    """When it can wait no longer, at 5.75 s, others would be late for it, and it would wait behind 2.5 s of prompts."""
    world = World((), max_live=100, max_queue_wait_s=2.0)
    world.attach("b0", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b0", **CROWDED)
    for number in range(2):
        begin(world, f"{number}/0")
    assert world.submit("deferred/0", max_tokens=200, slo=KEEPS) == []
    for num_tokens in (1900, 600):
        assert world.submit(f"{num_tokens}/0", range(num_tokens), now=1.0) == ["reserve b0"]
    assert world.tick(5.7) == []
    assert world.tick(5.8) == ["end QUEUE_FULL"]


def test_one_that_would_wait_too_long_once_there_are_nodes_stops_nobody():
    """Of three that have waited for nodes the first begins; the others would be behind it for longer than is let."""
    world = World((), node_wait_s=60.0, max_queue_wait_s=2.0)
    for number in range(3):
        assert world.submit(f"{number}/0") == []
    for name in ("p0", "d0"):
        world.attach(name)
    learn(world, "p0", prefill_tokens_per_s=1.0)
    assert world.tick(1.0)[:2] == ["reserve d0", "prefill p0"]


def test_an_answer_that_has_begun_is_never_refused_for_the_longest_wait():
    world = World(("p0", "d0"), node_wait_s=60.0, max_queue_wait_s=2.0)
    for number in range(2):
        world.submit(f"{number}/0")
        world.first(world.attempt)
    for name in ("d0", "p0"):
        world.lose(name, now=1.0)
    for name in ("p0", "d0"):
        world.attach(name)
    learn(world, "p0", prefill_tokens_per_s=1.0)
    assert world.tick(2.0) == ["reserve d0", "prefill p0"] * 2


@given(st.lists(st.floats(0.01, 5.0), max_size=20), st.integers(1, 50))
def test_the_pace_of_a_queue_is_not_known_before_some_first_tokens_have_come(gaps_s, num_waiting):
    found, now, times_s = admission(max_queue_wait_s=1e-6), NOW, []
    for gap_s in gaps_s:
        now += gap_s
        times_s.append(now)
        found.first_token(tracked(None), 1, now)
    if len(times_s) < FEWEST_FIRST_TOKENS:
        found.check_wait(tracked(None), FULL, num_waiting, now)
        return
    wait_s = num_waiting * (now - times_s[0]) / (len(times_s) - 1)
    with pytest.raises(RequestError, match=f"after {wait_s:.1f} s"):
        found.check_wait(tracked(None), FULL, num_waiting, now)


def test_first_tokens_that_nobody_waits_behind_say_nothing_of_how_fast_a_queue_moves():
    found = admission(max_queue_wait_s=1.0)
    for number in range(FEWEST_FIRST_TOKENS):
        found.first_token(tracked(None), 1, NOW + number)
    with pytest.raises(RequestError, match=r"after 70\.0 s"):
        found.check_wait(tracked(None), FULL, 10 * (FEWEST_FIRST_TOKENS - 1), NOW + FEWEST_FIRST_TOKENS - 1)
    found.first_token(tracked(None), 0, NOW + FEWEST_FIRST_TOKENS)
    found.check_wait(tracked(None), FULL, 100, NOW + FEWEST_FIRST_TOKENS)


# ---- late ones ----

# A step takes 10 ms and 5 ms for each answer: two keep 22 ms.
CROWDED = {"step_weights": [0.010, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0], "prefill_tokens_per_s": 1000.0}
KEEPS = Slo("", 10.0, 0.022)


def crowded_world(**settings):
    """b0 writes two answers, as many as keep their limit, and one more is late. The attempts of the two."""
    world = World((), max_live=100, **settings)
    world.attach("b0", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b0", **CROWDED)
    attempts = [begin(world, f"{number}/0") for number in range(2)]
    assert world.submit("late/0", max_tokens=200, slo=Slo("", 1e-3, 0.022)) == []
    return world, attempts


def begin(world, request_id, now=0.0):
    assert world.submit(request_id, max_tokens=200, slo=KEEPS, now=now) == ["reserve b0"]
    world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)), now)
    return world.attempt


def test_a_late_request_is_owed_one_of_twenty_that_begin_while_it_waits():
    world, attempts = crowded_world()
    assert world.submit("later/0", max_tokens=200, slo=Slo("", 1e-3, 0.022)) == []
    num_first = round(1 / LATE_FLOOR)
    for number in range(num_first):
        now = number * 1e-3  # so that all are as far as if they had begun at once
        assert world.step(attempts.pop(0), 1, LENGTH, now, node="b0") == ["emit 1:101", "end complete"], number
        attempts.append(begin(world, f"new-{number}/0", now))
    ended = world.step(attempts.pop(0), 1, LENGTH, num_first * 1e-3, node="b0")
    assert ended == ["emit 1:101", "end complete", "reserve b0"]
    assert world.attempt.request_id == "late/0"
    ended = world.step(attempts.pop(0), 1, LENGTH, num_first * 1e-3, node="b0")
    assert ended == ["emit 1:101", "end complete"], "one alone was owed"


def test_a_late_request_begins_where_it_harms_nobody_and_leaves_a_place():
    """Two answers keep 22 ms, and three do not: one that is late begins where another one may come yet."""
    world, _ = crowded_world()
    world.attach("b1", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b1", **CROWDED)
    assert world.tick(0.5) == ["reserve b1"], "which has nothing to do"
    attempts = [world.attempt]
    assert world.submit("next/0", max_tokens=200, slo=Slo("", 1e-3, 0.022)) == ["reserve b1"], "it harms nobody"
    attempts.append(world.attempt)
    for attempt in attempts:
        world.tell("b1", events.first_token(events.sampled(attempt, 0, 100)), 0.6)
    assert world.submit("last/0", max_tokens=200, slo=Slo("", 1e-3, 0.022), now=0.7) == []
    assert world.step(attempts[0], 1, LENGTH, node="b1", now=0.8)[-1] == "end complete"
    assert world.tick(0.9) == [], "beside the other it would take the last place"
    assert world.step(attempts[1], 1, LENGTH, node="b1", now=1.0)[-1] == "reserve b1"


def test_late_ones_go_by_priority_and_age():
    world, attempts = crowded_world()
    for name, priority in (("older", 0), ("first", -1), ("last", 1)):
        assert world.submit(f"{name}/0", max_tokens=200, slo=Slo("", 1e-3, 0.022, priority)) == []
    begun = []
    for _ in range(4):
        for attempt in attempts:
            told = world.step(attempt, 1, LENGTH, node="b0")
        assert told[-1] == "reserve b0"
        begun.append(world.attempt.request_id)
        world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)))
        attempts = [world.attempt]
    assert begun == ["first/0", "late/0", "older/0", "last/0"]


def test_a_late_request_that_is_asked_for_after_its_time_hurries_nobody():
    world, attempts = crowded_world()
    for attempt in attempts:
        world.step(attempt, 1, LENGTH, node="b0", now=5.0)
    assert world.attempt.request_id == "late/0"
    assert not world.jobs[-1].due.HasField("ttft_left_s")
    assert world.jobs[-1].due.tpot_s == 0.022


# ---- what a node refuses ----


@pytest.mark.parametrize(("admits_late", "refuses_late"), [(True, False), (False, True)])
def test_nodes_are_told_to_refuse_what_would_be_late_where_the_configuration_says_so(admits_late, refuses_late):
    world = World(("p0", "d0"), admits_late=admits_late)
    world.submit(slo=Slo("", 5.0, None))
    assert [job.due.refuses_late for job in world.jobs] == [refuses_late] * 2
    world.first(world.attempt)
    world.lose("d0", now=1.0)
    assert not any(job.due.refuses_late for job in world.jobs[2:]), "it has begun"


def test_what_a_node_refuses_ends_with_when_to_come_again():
    world = World(("p0", "d0"), admits_late=False)
    world.submit(slo=Slo("", 5.0, None))
    assert world.tell("p0", events.failed(world.attempt, "WOULD_BE_LATE"), 3.0) == ["cancel d0", "end WOULD_BE_LATE"]
    assert wait_of(world.outcome) == MIN_RETRY_AFTER_S
    assert "cannot be kept" in str(world.outcome)
    assert world.tell("d0", events.cancelled(world.attempt), 3.0) == []
    assert world.scheduler.num_open == 0
    world.ledger.check_integrity()


def test_an_embedding_that_nobody_had_predicted_says_nothing_of_predictions():
    """Two prompts of 3 s take 6 s, of 7 less the tenth that a new coordinator spares."""
    world = slow_world(admits_late=False)
    times = {"arrived_s": 0.0, "deadline_s": 100.0, "now": 0.0}
    asked = {"slo": Slo("", 2.0, None), "pooling": Pooling(LAST)}
    world.short(world.scheduler.submit("e/0", Prompt(PROMPT), SamplingParams(max_tokens=0), **times, **asked))
    assert world.tell("p0", events.failed(world.attempt, "WOULD_BE_LATE"), 1.0)[-1] == "end WOULD_BE_LATE"
    world.submit("first/0", now=1.0, slo=Slo("", 7.0, None))
    assert world.submit("second/0", now=1.0, slo=Slo("", 7.0, None)) == ["reserve d0", "prefill p0"]
