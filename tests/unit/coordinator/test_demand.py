"""How many nodes a load needs, worked out by hand."""

import pickle
from dataclasses import dataclass, field

import pytest

from coordinator.control.load import LengthEstimator
from coordinator.control.nodes import MAX_NODES, Registry
from coordinator.control.roles import CATCH_UP_S, LEAST_S, MAX_SAMPLES, WINDOW_S, Demand, EndedRequest
from coordinator.control.slo import Slo
from protos import inference_pb2
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import World

SLOTS = 8
WEIGHTS = (0.1, 0.01, 0.0, 0.0, 0.001, 0.0, 0.0)  # of a step, an answer, a token before it, ...
# Of a prompt of 100 tokens half is computed, at 1,000 tokens a second. A full node writes 8 tokens in 0.18 s, so 20
# take 0.45 s of its time; 0.5 s in all.
USUAL = EndedRequest(num_prompt=100, num_computed=50, num_output=21)
READ_ALONE = EndedRequest(num_prompt=1000, num_computed=1000, num_output=1)


def fleet(count=1, *, rate=1000.0, weights=WEIGHTS, **hello):
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    for index in range(count):
        node = registry.admit(events.hello(f"b{index}", **{"max_num_seqs": SLOTS} | hello).hello, 0.0)
        beat = events.heartbeat(prefill_tokens_per_s=rate, step_weights=weights)
        registry.heartbeat(node, beat.heartbeat, 0.0)
    return registry.nodes


def asked(per_s, seconds=WINDOW_S, usual=USUAL):
    """So many come in each second, evenly."""
    demand = Demand()
    for index in range(round(per_s * seconds)):
        demand.arrived(1000.0 + index / per_s)
    if usual is not None:
        demand.ended(usual)
    demand.tick(1000.0 + seconds)
    return demand


@pytest.mark.parametrize(
    ("per_s", "needed"),
    [(1, 1), (1.5, 1), (2, 2), (3, 2), (4, 3), (7, 5), (15, 10)],  # times 0.5 s, by 0.8
)
def test_what_is_offered_by_what_an_answer_takes(per_s, needed):
    assert asked(per_s).nodes_needed(fleet(), 0).mixed == needed


def test_each_role_by_its_part_of_the_time():
    """Of the 0.5 s of an answer 0.05 s are for its prompt."""
    assert asked(20).nodes_needed(fleet(), 0) == (13, 2, 12)  # 20 times 0.5, 0.05 and 0.45 s, by 0.8
    assert asked(20, usual=READ_ALONE).nodes_needed(fleet(), 0) == (25, 25, 1)


def test_while_costs_are_unknown_the_nodes_of_each_role_are_what_is_needed():
    nodes = [*fleet(3, role="prefill"), *fleet(2, role="decode"), *fleet(1)]
    assert asked(4, usual=None).nodes_needed(nodes, 0) == (6, 4, 3)


def test_nothing_asked_needs_one_node():
    assert Demand().nodes_needed(fleet(5), 0).mixed == 1
    assert asked(4, usual=None).nodes_needed([], 0).mixed == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20])
def test_the_number_of_nodes_does_not_matter(count):
    """So no fleet is told to shrink, and then to grow again."""
    assert asked(4).nodes_needed(fleet(count), 0).mixed == 3


def test_while_costs_are_not_known_as_many_as_there_are():
    assert asked(4, usual=None).nodes_needed(fleet(7), 0).mixed == 7
    assert asked(4).nodes_needed(fleet(7, rate=0.0), 0).mixed == 7
    assert asked(4).nodes_needed(fleet(7, weights=()), 0).mixed == 7


def test_who_waits_counts_as_if_it_came_within_half_a_minute():
    demand = asked(2)
    assert demand.nodes_needed(fleet(), round(2 * CATCH_UP_S)).mixed == asked(4).nodes_needed(fleet(), 0).mixed == 3


def test_a_full_node_holds_as_many_as_its_pool_does():
    """The pool of 20 blocks holds two answers of 110 tokens: a token takes half of 0.12 s, so 20 take 1.2 s."""
    assert asked(4).nodes_needed(fleet(num_blocks=20), 0).mixed == 7  # 4 * 1.25 / 0.8 = 6.25


def test_what_answers_share_takes_its_pool_once():
    """Where others hold 55 of the 110 tokens the same pool holds four: a token takes a quarter of 0.14 s."""
    sharing = USUAL._replace(num_spared=55.5)
    assert asked(4, usual=sharing).nodes_needed(fleet(num_blocks=20), 0).mixed == 4  # 4 * 0.75 / 0.8 = 3.75


@dataclass
class Told:
    """What the estimators of a scheduler were told, in order."""

    arrived_s: list = field(default_factory=list)
    ended: list = field(default_factory=list)
    lengths: list = field(default_factory=list)


@pytest.fixture
def told(monkeypatch):
    told = Told()

    def note(kind, name, notes):
        method = getattr(kind, name)

        def noting(self, value):
            notes.append(value)
            method(self, value)

        monkeypatch.setattr(kind, name, noting)

    note(Demand, "arrived", told.arrived_s)
    note(Demand, "ended", told.ended)
    note(LengthEstimator, "ended", told.lengths)
    return told


def test_what_each_of_several_answers_shares_with_the_others_is_their_part(told):
    world = World(("b0",))
    world.holds("b0", [1])
    for number in range(3):
        world.submit(f"{number}/0", [*range(32), number], max_tokens=1)
        attempt = world.attempt
    world.tell("b0", events.first_token(events.sampled(attempt, 0, 100, events.LENGTH)))
    [ended] = told.ended
    assert ended.num_spared == pytest.approx(32 * 2 / 3)


def test_a_full_node_holds_as_many_as_keep_their_limits():
    """Within 0.165 s it writes 6 tokens; 0.6 of them, 3, on average: 20 take 0.867 s."""
    limited = USUAL._replace(tpot_s=0.165)
    assert asked(4, usual=limited).nodes_needed(fleet(), 0).mixed == 5  # 4 * 0.917 / 0.8 = 4.58


def test_a_prompt_that_nodes_hold_costs_nothing_to_read():
    assert asked(2, usual=READ_ALONE).nodes_needed(fleet(), 0).mixed == 3  # 2 * 1 / 0.8
    assert asked(2, usual=READ_ALONE._replace(num_computed=10)).nodes_needed(fleet(), 0).mixed == 1


def test_it_forgets_what_came_more_than_a_minute_ago():
    demand = asked(15)
    assert demand.nodes_needed(fleet(), 0).mixed == 10
    demand.tick(1000.0 + 1.5 * WINDOW_S)
    assert demand.nodes_needed(fleet(), 0).mixed == 5
    demand.tick(1000.0 + 2 * WINDOW_S)
    assert demand.nodes_needed(fleet(), 0).mixed == 1


def test_the_first_requests_are_no_rate_yet():
    demand = asked(100, seconds=0.1)
    assert demand.nodes_needed(fleet(), 0).mixed == 1  # 10 within LEAST_S
    assert LEAST_S == 10.0


def test_requests_that_come_in_another_order_cost_no_memory():
    demand, sizes = Demand(), []
    for _ in range(2):
        for index in range(40 * MAX_SAMPLES):
            demand.arrived(1000.0 + index % 2)
            demand.ended(USUAL)
        sizes.append(len(pickle.dumps(demand)))
    assert sizes[0] == sizes[1] < 100 * MAX_SAMPLES
    assert demand.nodes_needed(fleet(), 0).mixed == MAX_NODES


def test_drained_nodes_tell_nothing():
    nodes = fleet(2)
    nodes[0].load.prefill_tokens_per_s = 1.0
    assert asked(2, usual=READ_ALONE).nodes_needed(nodes, 0).mixed == 5  # at 500.5 tokens a second
    nodes[0].is_ready = False
    assert asked(2, usual=READ_ALONE).nodes_needed(nodes, 0).mixed == 3


def test_the_scheduler_counts_who_is_refused_and_how_answers_end(told):
    world = World(max_live=1)
    world.submit("a/0", now=10.0, max_tokens=2, slo=Slo("", None, 0.5))
    with pytest.raises(RequestError, match="the limit is 1"):
        world.submit("b/0", now=10.0)
    attempt = world.attempt
    world.first(attempt, now=11.0, num_cached_tokens=2)
    world.tell("d0", events.reserved(attempt), 11.0)
    world.tell("d0", events.committed(attempt), 11.0)
    world.tell("d0", events.step_tokens(events.sampled(attempt, 1, 102, events.LENGTH)), 12.0)
    world.tick(20.0)
    assert told.arrived_s == [10.0, 10.0]
    assert told.ended == [EndedRequest(num_prompt=3, num_computed=1, num_output=2, tpot_s=0.5)]
    assert world.scheduler.nodes_needed.mixed == 4, "the nodes have told nothing of their rates"


def test_what_ends_with_a_stop_string_or_an_embedding_counts_and_what_its_client_left_does_not(told):
    world = World(max_live=4)
    for name, reason in (("a/0", inference_pb2.FINISH_REASON_STOP), ("b/0", inference_pb2.FINISH_REASON_ABORT)):
        world.submit(name, max_tokens=500)
        world.first(world.attempt)
        world.scheduler.finish(name, reason, 0.0)
    assert [each.num_output for each in told.ended] == [1]
    assert told.lengths == [1]

    world = World(("p0",), embeds=True)
    world.embed("e/0")
    world.tell("p0", events.embedded(world.attempt, b"abcd"), 0.0)
    assert told.ended[1:] == [EndedRequest(num_prompt=3, num_computed=3, num_output=0)]
    assert told.lengths == [1], "an embedding is no answer of no tokens"


def test_embeddings_take_what_their_prompts_take():
    """A second each, four a second, by 0.8."""
    embedded = EndedRequest(num_prompt=1000, num_computed=1000, num_output=0)
    assert asked(4, usual=embedded).nodes_needed(fleet(), 0).mixed == 5
    mixed = asked(4, usual=embedded)
    mixed.ended(READ_ALONE)
    assert mixed.nodes_needed(fleet(), 0).mixed == 5, "no fewer tokens than none are written"
