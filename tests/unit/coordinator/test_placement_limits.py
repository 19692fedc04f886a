"""Which nodes a request goes to where answers have limits: by hand, and against one count over all pairs."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.control.load import NO_ARRIVALS, Arrivals, Prompt
from coordinator.control.placement.costs import Wanted
from coordinator.control.placement.policy import MOST_PREFILL_NODES, POLICIES
from coordinator.control.placement.slo_forecast import (
    PrefillPace,
    SloForecast,
    spared_node,
    step_s,
)
from serving_core.slo import Due
from tests import fleet_events as events
from tests.unit.coordinator.placement_kit import COMING, NOW, TOKENS, Fleet


@pytest.fixture
def fleet():
    return Fleet()


def names(placed):
    return f"{placed.prefill_node.name} {placed.decode_node.name}"


def test_a_prompt_is_late_behind_others_that_are_due_before(fleet):
    p0 = fleet.add("p0")
    fleet.reads(p0, 300, due_in_s=0.35)
    assert fleet.late(p0, Due(NOW + 0.43)).late_by_prefill == 0  # 310 ms, then its own 110 ms
    assert fleet.late(p0, Due(NOW + 0.41)).late_by_prefill == 1
    assert fleet.late(p0, Due(NOW + 0.41)).prefill_wait_s() == pytest.approx(0.01)
    assert fleet.late(p0, Due(NOW + 0.10)).late_by_prefill == 1  # it could not be in time alone
    assert fleet.late(p0).late_by_prefill == 0  # without limits it comes behind them


def test_a_prompt_that_is_due_first_makes_another_one_late(fleet):
    p0 = fleet.add("p0")
    fleet.reads(p0, 300, due_in_s=0.35)
    assert fleet.late(p0, Due(NOW + 0.12)).late_by_prefill == 1


def test_who_is_late_already_is_not_counted_again(fleet):
    p0 = fleet.add("p0")
    fleet.reads(p0, 300, due_in_s=0.1)
    assert fleet.late(p0, Due(NOW + 0.12)).late_by_prefill == 0


def test_answers_are_late_whose_last_tokens_come_too_late_beside_one_more(fleet):
    d0 = fleet.add("d0")
    for tpot_s in (0.013, 0.015, 0.1):
        fleet.writes(d0, tpot_s)
    # 16 ms now: two are late. 18 ms with one more.
    assert fleet.late(d0).late_by_decode(0.0) == 0
    assert fleet.late(d0, Due(tpot_s=0.017)).late_by_decode(0.0) == 1
    fleet.writes(d0, 0.019)  # 18 ms, and 20 ms with one more: for so long as that one is written
    assert fleet.late(d0).late_by_decode(0.0) == 0
    assert fleet.late(d0, num_tokens=600).late_by_decode(0.0) == 1  # 599 * 20 + 401 * 18 ms
    assert fleet.late(d0, num_tokens=100).late_by_decode(0.0) == 0  # 99 * 20 + 901 * 18 ms are within 1000 * 19
    assert fleet.late(d0, Due(tpot_s=0.05), num_tokens=600).late_by_decode(0.5) == 2  # itself, too: it waits for blocks


def test_an_answer_minds_nobody_who_has_ended_when_it_begins(fleet):
    d0 = fleet.add("d0")
    fleet.writes(d0, 0.0128, num_left=20)  # 20 steps have 256 ms: 9 of 14 ms and 11 of 12 ms take 258
    assert fleet.late(d0, Due(tpot_s=0.0128)).late_by_decode(0.0) == 2
    assert fleet.late(d0, Due(tpot_s=0.0128)).late_by_decode(0.0, begins_s=0.25) == 0


def test_answers_to_come_begin_when_their_prompts_are_read(fleet):
    """One after the other: 110 ms, then 310 ms. Each is written alone, in nine steps of 12 ms."""
    p0, d0 = fleet.add("p0"), fleet.add("d0")
    fleet.reads(p0, 100, due_in_s=1.0, decode_node=d0, tpot_s=0.0128)
    fleet.reads(p0, 300, due_in_s=2.0, decode_node=d0, tpot_s=0.0128)
    assert fleet.late(d0, Due(tpot_s=0.0128)).late_by_decode(0.0, begins_s=0.22) == 0
    assert fleet.late(d0, Due(tpot_s=0.0128)).late_by_decode(0.0, begins_s=0.15) == 2


def test_beside_answers_a_prompt_gets_what_they_are_ahead_and_then_a_share(fleet):
    b0 = fleet.add("b0")
    fleet.writes(b0, 0.024, num_output=11, ago_s=0.1)  # its next token is due in 164 ms, 152 more than a step takes
    assert fleet.late(b0, Due(NOW + 0.110 + 1e-6)).late_by_prefill == 0
    assert fleet.late(b0, Due(NOW + 0.110 - 1e-3)).late_by_prefill == 1
    fleet.writes(b0, 0.028)  # it has just begun: 14 ms are ahead, and steps of 14 ms leave 10 of 24
    in_time_s = 0.014 + (0.110 - 0.014) * 24 / 10
    assert fleet.late(b0, Due(NOW + in_time_s + 1e-6)).late_by_prefill == 0
    assert fleet.late(b0, Due(NOW + in_time_s - 1e-3)).late_by_prefill == 1


def test_beside_answers_to_come_a_prompt_gets_all_of_the_time_until_they_begin(fleet):
    """Another node reads 50 tokens in 60 ms; then an answer of 24 ms in steps of 12 ms leaves half of the time."""
    p0, b0 = fleet.add("p0"), fleet.add("b0")
    fleet.reads(p0, 50, due_in_s=1.0, decode_node=b0, tpot_s=0.024)
    bank_s = 0.060 + 0.024 - 0.012
    assert fleet.late(b0).own_begins_s == pytest.approx(bank_s + (0.110 - bank_s) / 0.5)


def test_an_answer_leaves_prompts_what_its_own_limit_does(fleet):
    """One of 110 ms, of 200: beside steps of 12 ms an answer of 48 ms leaves it three quarters of the time, and one of
    12.8 ms a sixteenth."""
    b0 = fleet.add("b0")
    fleet.reads(b0, 100, due_in_s=0.2)
    assert fleet.late(b0, Due(tpot_s=0.048)).late_by_decode(0.0) == 0
    assert fleet.late(b0, Due(tpot_s=0.0128), num_tokens=900).late_by_decode(0.0) == 1


def test_a_prompt_is_not_read_beside_the_answers_of_those_that_come(fleet):
    """Two more tokens and b0 has nothing to do. But of eight requests a second, with 26 tokens each, five answers are
    written at any time, in steps of 20 ms: of 24 ms they leave a sixth."""
    b0, _ = fleet.add("b0"), fleet.add("b1")
    fleet.writes(b0, 0.024, num_left=2)
    due, coming = Due(NOW + 0.3, 0.024), Arrivals(8.0, 100.0, 26.0)
    there = fleet.late(b0, due, num_tokens=50, coming=coming)
    assert there.own_begins_s < 0.15
    assert there.lasting_begins_s == pytest.approx(0.110 * 6)
    assert names(fleet.place(due, num_tokens=50, coming=coming)) == "b1 b0"
    assert fleet.late(b0, due, num_tokens=50, coming=NO_ARRIVALS).lasting_begins_s == pytest.approx(0.110 * 2)


def test_no_prompts_are_lost_that_other_nodes_could_not_decode(fleet):
    """A sequence of 400 tokens takes 12 of each 24 ms. Eight prompts a second are 0.8 of a node's time: 0.3 are lost.
    With 60 tokens each, 11.52 sequences decode at a time in steps of 24 ms. One other node attains that limit with 7 of
    them, so that 0.486 of the time is wanted, and two nodes with all."""
    there = fleet.late(fleet.add("b0"), Due(NOW + 0.3, 0.024), num_tokens=401, coming=Arrivals(8.0, 100.0, 60.0))
    assert there.num_lost(1) == 0
    assert there.num_lost(2) == int((0.8 - 0.5) * 400 * 0.024 / 0.100)


@given(st.lists(st.integers(1, 200), max_size=12), st.floats(0, 50), st.floats(0, 50), st.integers(1, 3))
def test_more_load_leaves_prompts_no_more_time(nums_left, per_s, more_per_s, num_nodes):
    fleet = Fleet()
    b0 = fleet.add("b0")
    for num_left in nums_left:
        fleet.writes(b0, 0.05, num_left=num_left)
    less, more = (
        fleet.late(b0, Due(NOW + 1, 0.05), coming=Arrivals(rate, 100.0, 40.0)) for rate in (per_s, per_s + more_per_s)
    )
    assert less.lasting_begins_s <= more.lasting_begins_s
    assert less.num_lost(num_nodes) <= more.num_lost(num_nodes) <= more.num_lost(num_nodes + 1)
    before_s = added_decode_s(fleet, b0)
    fleet.writes(b0, 0.05, num_left=100)
    assert added_decode_s(fleet, b0) <= before_s


def added_decode_s(fleet, node):
    """Of a request with ten tokens."""
    wanted = Wanted(Prompt(TOKENS), len(TOKENS) + 10, due=Due(NOW + 9, 0.05))
    return SloForecast(fleet.ledger, wanted, NOW).added_decode_s(node)


def test_a_sequence_goes_where_steps_are_made_anyway(fleet):
    """Nine tokens after the first take steps of 12 ms on a node without sequences. One with a queued prompt does not
    decode yet, so they are as many there."""
    b0, b1 = fleet.add("b0"), fleet.add("b1")
    assert added_decode_s(fleet, b0) == pytest.approx(9 * 0.012)
    fleet.reads(b0, 30, due_in_s=5, decode_node=b0, tpot_s=0.05)
    assert added_decode_s(fleet, b0) == pytest.approx(9 * 0.012)
    fleet.writes(b1, 0.05, num_left=6)
    assert added_decode_s(fleet, b1) == pytest.approx(3 * 0.012)
    fleet.writes(b1, 0.05, num_left=100)
    assert added_decode_s(fleet, b1) == 0
    assert names(fleet.place(Due(NOW + 9, 0.05), coming=NO_ARRIVALS)) == "b0 b1"


def test_a_transfer_takes_of_the_time_until_the_last_token(fleet):
    """Nine tokens after the first, in steps of 12 ms and due 20 ms each, have 72 ms to spare."""
    d0, due = fleet.add("d0"), Due(NOW + 9, 0.020)
    assert [fleet.late(d0, due).late_by_decode(0.0, 0.0, taken_s) for taken_s in (0.07, 0.075)] == [0, 1]


def test_answers_take_no_more_of_the_time_than_they_have_tokens_left(fleet):
    """Two answers of 24 ms in steps of 14 ms, the longer one with five tokens to come: it is over after 70 ms."""
    b0 = fleet.add("b0")
    fleet.writes(b0, 0.024, num_left=2)
    fleet.writes(b0, 0.024, num_left=5)
    assert fleet.late(b0, Due(NOW + 0.110 + 0.070 + 1e-6)).late_by_prefill == 0
    assert fleet.late(b0, Due(NOW + 0.110 + 0.070 - 1e-3)).late_by_prefill == 1


def test_an_answer_that_is_handed_over_is_late_for_a_chunk_that_takes_longer_than_it_gains(fleet):
    """Steps of 12 ms: of 18 ms, 6 ms are gained with each of two tokens after the first."""
    b0, due = fleet.add("b0"), Due(tpot_s=0.018)
    fleet.reads(b0, 11)
    assert fleet.late(b0, due, num_tokens=3).late_by_decode(0.0) == 0
    fleet.reads(b0, 2)
    assert fleet.late(b0, due, num_tokens=3).late_by_decode(0.0) == 1
    assert fleet.late(b0, due, num_tokens=4).late_by_decode(0.0) == 0
    assert fleet.late(b0, due, num_tokens=1).late_by_decode(0.0) == 0  # nothing of it is written there
    fleet.reads(b0, 100)
    fleet.writes(b0, 0.0145)  # which lets no chunk take longer; two steps of 14 ms with one more, and a chunk: 42.5 ms
    assert fleet.late(b0, Due(tpot_s=0.0212), num_tokens=3).late_by_decode(0.0) == 1
    assert fleet.late(b0, Due(tpot_s=0.0213), num_tokens=3).late_by_decode(0.0) == 0


@pytest.mark.parametrize(("num_tokens", "num_late"), [(9, 1), (20, 0)])
def test_a_prompt_makes_answers_late_that_are_to_come(fleet, num_tokens, num_late):
    """It takes 100 ms; of 20 ms in steps of 12 ms, or 14 ms beside its own answer, 8 or 6 ms are gained each time."""
    b0 = fleet.add("b0")
    fleet.awaits(b0, 0.020, num_tokens)
    assert fleet.late(b0).late_by_prefill == num_late
    assert fleet.late(b0).late_by_both(0.0) == num_late


def test_an_answer_of_one_token_is_late_for_no_other(fleet):
    """A second node that reads for it could make it wait for a chunk, if anything were to be written."""
    b0 = fleet.add("b0")
    fleet.awaits(b0, 0.020, 1)
    assert fleet.late(b0).late_by_prefill == 0


def test_an_answer_that_waits_for_blocks_is_late_once(fleet):
    d0 = fleet.add("d0")
    own = Due(NOW + 1, 0.011)  # and a step of one takes 12 ms
    assert fleet.late(d0, own).late_by_decode(0.0) == fleet.late(d0, own).late_by_decode(0.5) == 1


def test_an_answer_is_late_for_want_of_blocks_only_where_it_waits_for_them_longer_than_for_its_prompt(fleet):
    d0 = fleet.add("d0")
    assert fleet.late(d0, Due(tpot_s=0.1)).late_by_decode(0.5, begins_s=0.6) == 0
    assert fleet.late(d0, Due(tpot_s=0.1)).late_by_decode(0.5, begins_s=0.4) == 1
    assert fleet.late(d0, Due(NOW + 9)).late_by_decode(0.5) == 0  # its first token needs none there


def test_who_finds_no_slot_waits_until_an_answer_ends(fleet):
    """Steps of two answers take 14 ms."""
    b0 = fleet.add("b0", max_num_seqs=2)
    fleet.writes(b0, 0.1, num_left=1000)
    assert fleet.late(b0, Due(NOW + 1)).room_s == 0.0
    fleet.writes(b0, 0.1, num_left=20)
    assert fleet.late(b0, Due(NOW + 1)).room_s == pytest.approx(20 * 0.014)
    assert fleet.place(Due(NOW + 0.5)).num_late == 0
    placed = fleet.place(Due(NOW + 0.3))
    assert (placed.num_late, placed.wait_s) == (1, pytest.approx(0.28))


def test_who_finds_no_room_in_the_pool_waits_until_enough_answers_have_ended(fleet):
    """Of a pool 30 tokens are left; the two that end first hold 50 and 400, and the prompt has 100."""
    b0 = fleet.add("b0")
    for num_held, num_left in ((50, 10), (400, 20), (b0.pool_tokens - 480, 500)):
        fleet.ledger.set_due(str(num_left), Due(tpot_s=0.1, began_s=NOW), 1, num_left)
        fleet.ledger.decode(str(num_left), b0, num_held)
    assert fleet.late(b0, Due(NOW + 1)).room_s == pytest.approx(20 * 0.016)
    fleet.ledger.decode("unlimited", b0, b0.pool_tokens)  # nobody knows when it ends: it is not sooner than the others
    assert fleet.late(b0, Due(NOW + 1)).room_s == pytest.approx(500 * 0.018)


def test_an_answer_that_ends_makes_room_by_what_no_other_one_holds(fleet):
    """Of two that hold 110 tokens each, 96 are the same: 30 are left, and one of these prompts leaves 14 more."""
    b0 = fleet.add("b0")
    fleet.registry.cache_changed(b0, events.cache_changed([1]).cache_changed)
    marks = Prompt(TOKENS).block_hashes(16)
    for num_left in (10, 20):
        fleet.ledger.set_due(str(num_left), Due(tpot_s=0.1, began_s=NOW), 1, num_left)
        fleet.ledger.decode(str(num_left), b0, 110, marks)
    fleet.ledger.set_due("big", Due(tpot_s=0.1, began_s=NOW), 1, 500)
    fleet.ledger.decode("big", b0, b0.pool_tokens - 124 - 30)

    def room_s(num_tokens):
        wanted = Wanted(Prompt([7] * num_tokens), num_tokens + 10, due=Due(NOW + 1))
        return SloForecast(fleet.ledger, wanted, NOW).on(b0).room_s

    assert [room_s(30), room_s(44), room_s(58), room_s(59)] == pytest.approx([0.0, 0.16, 0.32, 8.0])
    assert fleet.late(b0, Due(NOW + 1)).room_s == 0.0  # of its 100 tokens four are missing


def test_prompts_without_limits_that_wait_are_in_no_step(fleet):
    b0 = fleet.add("b0")
    for _ in range(30):
        fleet.reads(b0, 100, decode_node=b0)
    assert step_s(b0, fleet.ledger) == 0.0
    assert fleet.place(Due(NOW + 2, 0.05)).is_timely
    fleet.writes(b0)
    assert step_s(b0, fleet.ledger) == pytest.approx(0.012)


def test_to_make_an_answer_late_is_no_merit_where_prompts_gain_by_it(fleet):
    """Steps of 12 ms leave prompts little beside an answer of 13.1 ms. One more makes it late: 599 steps of 14 ms and
    401 of 12 ms take 13.198 s."""
    p0, b0, d1 = fleet.add("p0"), fleet.add("b0"), fleet.add("d1")
    fleet.writes(b0, 0.0131)
    for index in range(4):
        fleet.reads(b0, 100, due_in_s=1.0 + 0.1 * index)
    own = Due(NOW + 9, 1.0)
    assert fleet.late(b0, own, num_tokens=600).late_by_decode(0.0, 0.1) == 1
    placed = fleet.place(own, num_tokens=600)
    assert (placed.prefill_node, placed.decode_node, placed.is_timely) == (p0, d1, True)


@pytest.mark.parametrize("due_in_s", [None, -0.01, 50.0])
def test_a_prompt_that_is_overdue_takes_nothing_of_what_answers_are_ahead(fleet, due_in_s):
    """The answer is 3.8 s ahead. Who is late anyway is read behind the others."""
    b0 = fleet.add("b0")
    fleet.writes(b0, 0.024, num_output=200, ago_s=1.0)
    if due_in_s is not None:
        fleet.reads(b0, 100, due_in_s=due_in_s, decode_node=b0, tpot_s=1.0)
    assert fleet.place(Due(NOW + 0.2, 0.1)).is_timely


@pytest.mark.parametrize(("due_in_s", "is_in_time"), [(0.9, False), (2.0, True), (-0.01, True), (None, True)])
def test_a_prompt_that_is_overdue_or_never_due_is_read_behind_those_in_time(fleet, due_in_s, is_in_time):
    """It takes 3.06 s, in six steps, and the node reads what is due first of what can be in time."""
    p0 = fleet.add("p0")
    fleet.reads(p0, 3000, due_in_s=math.inf if due_in_s is None else due_in_s)
    assert fleet.late(p0, Due(NOW + 1.0)).is_own_late is not is_in_time


@pytest.mark.parametrize(("decode_margin", "num_sequences"), [(1.0, 9), (1.2, 7), (1.5, 4)])
def test_steps_count_as_long_as_they_rarely_are(fleet, decode_margin, num_sequences):
    """Of 30 ms: ten answers in a step of exactly that, eight in one of 26, which is 31.2 at most."""
    b0 = fleet.add("b0", margin=decode_margin)
    for number in range(num_sequences + 1):
        is_full = decode_margin * (0.010 + 0.002 * (number + 1)) > 0.030 + 1e-9
        assert (fleet.late(b0, Due(NOW + 9.0)).tpot_ratio(BEGINS_S) > 1) is (is_full and number > 0), number
        fleet.writes(b0, 0.030, num_output=1000, ago_s=10.0, num_left=10)


def test_prompts_that_are_never_due_are_nothing_to_wait_for(fleet):
    b0 = fleet.add("b0", role="mixed")
    fleet.awaits(b0, 0.04, 10)
    fleet.ledger.prefill("1", b0, 10_000)
    assert fleet.late(b0, Due(NOW + 2, 0.04)).prefill_wait_s() == 0.0
    fleet.reads(b0, 10_000, due_in_s=100)
    assert fleet.late(b0, Due(NOW + 2, 0.04)).prefill_wait_s() > 8.0


@pytest.mark.parametrize(("num_ahead", "num_steps"), [(0, 40), (3, 40), (4, 90), (6, 200), (99, 200)])
def test_a_node_with_too_many_answers_says_when_those_ahead_and_this_one_find_places(fleet, num_ahead, num_steps):
    """Ten of 30.5 ms, in steps of 30 ms: there is no time for one more, prompt or not. The first to wait has the place
    of the answer that ends first, and so on."""
    b0 = fleet.add("b0", role="mixed")
    for num_left in (*[40] * 4, 90, 90, *[200] * 4):
        fleet.writes(b0, 0.0305, num_output=1000, ago_s=10.0, num_left=num_left)
    due = Due(NOW + 9, 0.05)
    assert fleet.late(b0, due, num_ahead=num_ahead).decode_wait_s() == pytest.approx(num_steps * 0.030)
    placed = fleet.place(due)
    assert not placed.is_timely
    assert placed.wait_s == pytest.approx(40 * 0.030)


def test_what_a_node_would_be_lent_it_need_not_read_beside_answers_either(fleet):
    b0, b1 = fleet.add("b0"), fleet.add("b1")
    fleet.writes(b1, 0.024)  # prompts get half of its time
    wanted = Wanted(Prompt(TOKENS), 110, due=Due(NOW + 1))
    whole, lent = (
        SloForecast(fleet.ledger, wanted, NOW, num_fetched).on(b1) for num_fetched in (lambda _: 0, lambda _: 90)
    )
    assert lent.own_begins_s < whole.own_begins_s / 5
    assert SloForecast(fleet.ledger, wanted, NOW, lambda node: 90 * (node is b1)).on(b0).own_begins_s == pytest.approx(
        0.11
    )


def test_a_long_answer_spares_the_node_whose_answers_are_over_first(fleet):
    """More prompts of 100 ms come than a node reads. One answer leaves them 88 ms of each step of 100 ms, two 86 ms."""
    b0, b1 = fleet.add("b0"), fleet.add("b1")
    fleet.writes(b0, 0.1, num_left=400)
    fleet.writes(b1, 0.1, num_left=2)
    fleet.reads(b0, 400)
    assert names(fleet.place(policy="sum")) == "b1 b1"
    assert names(fleet.place(Due(NOW + 9, 0.1), num_tokens=500)) == "b1 b0"
    assert names(fleet.place(Due(NOW + 9, 0.1), num_tokens=4)) == "b1 b1"  # 14 ms more
    late = fleet.late(b1, Due(NOW + 9, 0.1), num_tokens=500)
    assert late.num_lost(1) == int((2 * (0.88 - 0.86) + 497 * (1 - 0.88)) * 0.1 / 0.1)
    few = Arrivals(8.0, 100.0)  # 0.8 s of prompts a second, for which there is time beside answers
    assert fleet.late(b1, Due(NOW + 9, 0.1), num_tokens=500, coming=few).num_lost(1) == 0
    assert fleet.late(b0, Due(NOW + 9, 0.1), num_tokens=401).num_lost(1) == int(400 * (0.88 - 0.86))


def test_nobody_is_spared_where_two_are_equal_or_no_other_one_has_room(fleet):
    b0, b1 = fleet.add("b0"), fleet.add("b1")
    assert spared_node([b0, b1], fleet.ledger, NOW) is None
    fleet.writes(b0, 0.1)
    assert spared_node([b0, b1], fleet.ledger, NOW) is b1
    assert names(fleet.place(Due(NOW + 9, 0.1), num_tokens=500)) != "b1 b1"
    fleet.ledger.decode("big", b0, b0.pool_tokens)
    assert names(fleet.place(Due(NOW + 9, 0.1), num_tokens=500)) == "b1 b1"


def test_a_node_that_drains_is_not_the_one_to_be_spared(fleet):
    b0, b1 = fleet.add("b0"), fleet.add("b1")
    fleet.writes(b0, 0.1)
    drains = events.heartbeat(state="draining").heartbeat
    fleet.registry.heartbeat(b1, drains, 0.0)
    assert spared_node([b0, b1], fleet.ledger, NOW) is b0


@given(st.floats(0, 10), st.floats(0.01, 1), st.floats(0, 100), st.floats(0, 100) | st.just(math.inf))
def test_work_and_time_are_two_sides_of_a_pace(bank_s, share, seconds, most_lost_s):
    pace = PrefillPace(bank_s, share, most_lost_s)
    assert pace.seconds(pace.work_s(seconds)) == pytest.approx(seconds, abs=1e-9)


def test_the_fewest_late_come_before_the_fewest_seconds(fleet):
    p0 = fleet.add("p0")
    fleet.add("p1", [0.01, 0.002, 0, 0, 0.004, 0, 0])  # which is slower than its rate says
    fleet.add("d0")
    fleet.reads(p0, 50)
    assert names(fleet.place()) == "p1 d0"
    assert names(fleet.place(Due(NOW + 0.2))) == "p0 d0"
    assert names(fleet.place(Due(NOW + 0.2), policy="sum")) == "p1 d0"


def test_an_answer_goes_where_the_others_keep_their_limits(fleet):
    fleet.add("p0")
    d0, d1 = fleet.add("d0"), fleet.add("d1")
    fleet.writes(d0, 0.013)
    for _ in range(5):
        fleet.writes(d1)
    assert names(fleet.place(policy="sum")) == "p0 d0"  # with most room
    assert names(fleet.place()) == "p0 d1"  # steps of two take 14 ms
    assert names(fleet.place(num_tokens=600)) == "p0 d1"
    assert fleet.place(num_tokens=600).num_late == 0


def test_a_place_where_somebody_will_be_late_says_so_and_for_how_long(fleet):
    p0 = fleet.add("p0")
    fleet.add("d0")
    fleet.reads(p0, 400, due_in_s=0.45)
    placed = fleet.place(Due(NOW + 0.3))
    assert (placed.num_late, placed.wait_s) == (1, pytest.approx(0.41 + 0.11 - 0.3))


@pytest.mark.parametrize(
    ("policy", "pair"),
    [
        ("never", "b0 b0"),
        ("always", "b0 b1"),
        ("round-robin", "b0 b0"),
        ("least-loaded", "b1 b1"),
        ("lmetric", "b0 b0"),
        ("arrow", "b0 b1"),
    ],
)
def test_other_rules_by_hand(fleet, policy, pair):
    """b0 is to read 300 tokens and writes nothing; b1 is to read 250 and writes two answers."""
    b0, b1 = fleet.add("b0"), fleet.add("b1")
    fleet.reads(b0, 300)
    fleet.reads(b1, 250)
    fleet.writes(b1)
    fleet.writes(b1)
    assert names(fleet.place(policy=policy)) == pair


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rule_serves_what_can_be_served(fleet, policy):
    fleet.add("p0")
    fleet.add("d0")
    assert names(fleet.place(policy=policy)) == "p0 d0"
    fleet = Fleet()
    fleet.add("b0")
    assert names(fleet.place(policy=policy)) == "b0 b0"


JOBS = st.lists(st.tuples(st.integers(1, 400), st.floats(0.01, 1.0)), max_size=4)
ANSWERS = st.lists(st.tuples(st.sampled_from([0.013, 0.017, 0.03, 0.1]), st.integers(1, 5)), max_size=4)


@given(
    nodes=st.lists(st.tuples(st.sampled_from("pdb"), JOBS, ANSWERS), min_size=1, max_size=3),
    due=st.none() | st.tuples(st.floats(0.01, 1.0), st.sampled_from([0.013, 0.02, 0.1])),
)
def test_nobody_has_fewer_late_than_the_chosen_pair(nodes, due):
    assume(sum(role != "d" for role, *_ in nodes) <= MOST_PREFILL_NODES)  # of more, the cheapest are weighed
    fleet = Fleet()
    for index, (role, jobs, answers) in enumerate(nodes):
        node = fleet.add(f"{role}{index}")
        for num_tokens, due_in_s in jobs if node.shape.prefills else []:
            fleet.reads(node, num_tokens, due_in_s)
        for tpot_s, num_output in answers if node.shape.decodes else []:
            fleet.writes(node, tpot_s, num_output)
    able = list(fleet.registry.nodes)
    pairs = [(a, b) for a, b in itertools.product(able, able) if a.shape.prefills and b.shape.decodes]
    if not pairs:
        return
    own = Due(NOW + due[0], due[1]) if due else None

    def num_late(prefill_node, decode_node):
        on = SloForecast(fleet.ledger, Wanted(Prompt(TOKENS), 110, due=own), NOW).on
        if prefill_node is decode_node:
            return on(prefill_node).late_by_both(0.0)
        return on(prefill_node).late_by_prefill + on(decode_node).late_by_decode(0.0, on(prefill_node).own_begins_s)

    decode_nodes = {decode_node for _, decode_node in pairs}
    least = (
        spared_node([node for node in able if node.shape.prefills], fleet.ledger, NOW)
        if len(decode_nodes) > 1
        else None
    )

    def harm(prefill_node, decode_node):
        """One at least where the request itself is late however much time its prompt gets, or too many answers are."""
        on = SloForecast(fleet.ledger, Wanted(Prompt(TOKENS), 110, due=own, arrivals=COMING), NOW).on
        is_too_many = on(prefill_node).is_own_late or on(decode_node).tpot_ratio(on(prefill_node).least_prefill_s) > 1
        num_lost = on(decode_node).num_lost(len(decode_nodes) - 1) if decode_node is least else 0
        return (num_late(prefill_node, decode_node) or int(is_too_many)) + num_lost

    placed = fleet.place(own, transfer_s=0.0)
    assert placed.num_late == num_late(placed.prefill_node, placed.decode_node)
    if fleet.ledger.has_limits or own is not None:
        assert harm(placed.prefill_node, placed.decode_node) == min(harm(*pair) for pair in pairs)


BEGINS_S = 0.11  # when the 100 tokens are read, where nothing else is to be
TIGHT_S = 0.030  # keeps steps of ten answers


@pytest.mark.parametrize(("num_sequences", "is_crowded"), [(0, False), (9, False), (10, True)])
def test_a_node_takes_as_many_answers_as_a_step_within_the_tightest_limit_holds(fleet, num_sequences, is_crowded):
    node = fleet.add("b-0", role="mixed")
    for _ in range(num_sequences):
        fleet.writes(node, TIGHT_S, num_output=1000, ago_s=10.0, num_left=10)
    late = fleet.late(node, Due(NOW + 9.0, 0.050))
    assert late.late_by_both(0.0) == 0, "those that are written are 20 s ahead"
    assert (late.tpot_ratio(BEGINS_S) > 1.0) is is_crowded
    placed = fleet.place(Due(NOW + 9.0, 0.050))
    assert (placed.num_late, placed.is_timely) == (0, not is_crowded)


@pytest.mark.parametrize(("num_tokens", "is_crowded"), [(10, True), (1000, False)])
def test_answers_that_end_before_others_are_read_are_not_there_at_one_time(fleet, num_tokens, is_crowded):
    node = fleet.add("b-0", role="mixed")
    for _ in range(9):
        fleet.writes(node, TIGHT_S, num_output=1000, ago_s=10.0, num_left=10)
    fleet.reads(node, num_tokens, 9.0, node, TIGHT_S)  # ten tokens, 0.3 s, and 0.1 s for the request's own prompt
    assert (fleet.late(node, Due(NOW + 9.0, TIGHT_S)).tpot_ratio(BEGINS_S) > 1.0) is is_crowded


def test_a_limit_that_no_step_keeps_bounds_nothing(fleet):
    node = fleet.add("b-0", role="mixed")
    for _ in range(20):
        fleet.writes(node, 0.005, num_left=10)
    assert fleet.late(node, Due(NOW + 9.0, 0.060)).tpot_ratio(BEGINS_S) <= 1.0
    assert fleet.late(node, Due(NOW + 9.0, 0.050)).tpot_ratio(BEGINS_S) > 1.0
