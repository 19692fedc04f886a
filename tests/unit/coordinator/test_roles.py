"""What nodes are asked to become: by an operator, and by the coordinator's own policy."""

import contextlib
import itertools
import math
import random

import pytest

from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Registry
from coordinator.control.roles import (
    AUTO,
    CALM_S,
    CONFIRM_S,
    FIXED,
    LACKS_S,
    LASTS_S,
    MAX_STAY_S,
    MIN_STAY_S,
    REST_S,
    Roles,
)
from protos.convert import shape_from_wire, shape_to_wire
from serving_core.errors import RequestError
from serving_core.shapes import Shape
from serving_core.slo import Due
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, cluster, read_all, run, step

PREFILL, DECODE, BOTH = Shape(512, 0, False), Shape(0, 8, True), Shape(512, 8, True)
TICK_S = 0.25


class World:
    """Nodes that take every shape at once, unless `deaf` names them, and a ledger that the test fills."""

    def __init__(self, *names, policy=FIXED, rate=1000.0, embeds=False):
        self.registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9, embeds=embeds)
        self.ledger = Ledger()
        self.roles = Roles(self.registry, self.ledger, policy=policy)
        self.rate = rate
        self.now = 0.0
        self.deaf = set()
        self.told = []
        self.temporary = []  # of what was told, whether it was for a while
        for name in names:
            self.attach(name)

    def attach(self, name, **hello):
        self.beat(self.registry.admit(events.hello(name, max_num_seqs=8, **hello).hello, self.now))

    def beat(self, node, **load):
        beat = events.heartbeat(prefill_tokens_per_s=self.rate, **load)
        self.registry.heartbeat(node, beat.heartbeat, self.now)

    def node(self, name):
        return self.registry.find(name)

    def ask(self, name, to):
        """The shape that it was asked to take, None where nothing was."""
        _, _, sends = self.roles.set_shape(name, to, self.now)
        return self._carry_out(sends)

    def _carry_out(self, sends):
        shape = None
        for send in sends:
            shape = shape_from_wire(send.command.reshape.shape)
            self.told.append((self.now, send.node.name, shape))
            self.temporary.append(send.command.reshape.is_temporary)
            if send.node.name not in self.deaf:
                self.beat(send.node, shape=shape_to_wire(shape))
        return shape

    def wait(self, seconds):
        """The flips of that time, as (node, shape)."""
        first = len(self.told)
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self._carry_out(self.roles.tick(self.now))
        return [(name, shape) for _, name, shape in self.told[first:]]

    def queue(self, name, num_tokens):
        request_id = f"{random.random()}"
        self.ledger.prefill(request_id, self.node(name), num_tokens)
        return request_id

    def write(self, name, count):
        for _ in range(count):
            request_id = f"{random.random()}"
            self.ledger.decode(request_id, self.node(name), 10)
            self.ledger.first_token(request_id, 0.0)
            yield request_id


# ---- an operator ----


def test_a_role_or_a_shape_is_asked_for_and_counts_once_it_is_confirmed():
    world = World("p0", "p1", "d0", "d1")
    world.deaf = {"p0"}
    assert world.ask("p0", "mixed") == BOTH
    assert (world.node("p0").role, world.node("p0").usable) == ("prefill", PREFILL)
    world.beat(world.node("p0"), shape=shape_to_wire(BOTH))
    assert (world.node("p0").role, world.node("p0").usable) == ("mixed", BOTH)
    assert world.ask("d0", Shape(0, 3, False)) == Shape(0, 3, False)
    assert world.node("d0").shape == Shape(0, 3, False)


def test_what_a_node_is_already_is_not_asked_for():
    world = World("p0", "d0")
    assert world.ask("d0", "decode") is None
    assert world.node("d0").requested_shape is None


def test_a_node_that_does_not_confirm_counts_as_what_it_was_again():
    world = World("b0", "b1")
    world.deaf = {"b0"}
    world.ask("b0", "decode")
    world.wait(CONFIRM_S - TICK_S)
    assert world.node("b0").usable == DECODE
    world.wait(TICK_S)
    assert (world.node("b0").requested_shape, world.node("b0").usable) == (None, BOTH)


def test_a_node_that_is_lost_before_it_confirms_is_forgotten():
    """While one is to confirm, no other is asked."""
    world = World("p0", "d0", "d1", policy=AUTO)
    world.deaf = {"d0"}
    world.ask("d0", "mixed")
    world.registry.lose(world.node("d0"))
    world.queue("p0", 1e6)
    assert LASTS_S + 2 * TICK_S < CONFIRM_S
    assert world.wait(LASTS_S + 2 * TICK_S) == [("d1", BOTH)]


@pytest.mark.parametrize(
    ("names", "name", "to", "reason", "message"),
    [
        ("p0 d0", "x" * 200, "mixed", "NODE_NOT_FOUND", f"no node '{'x' * 80}' is attached"),
        ("p0 d0", "p0", "decode_node", "BAD_PARAM", "a role is prefill, decode or mixed, not 'decode_node'"),
        ("p0 d0", "p0", Shape(513, 0, False), "BAD_PARAM", "prompt_tokens of a shape is 513, the node's"),
        ("p0 d0", "p0", Shape(0, 9, False), "BAD_PARAM", "slots of a shape is 9, the node's max_num_seqs is 8"),
        ("p0 d0", "p0", Shape(0, 0, False), "BAD_PARAM", "a shape needs prompt_tokens or slots above 0"),
        ("p0 d0", "p0", "decode", "NO_OTHER_NODE", "node p0 is the last one that prefills prompts"),
        ("p0 d0", "d0", "prefill", "NO_OTHER_NODE", "node d0 is the last one that decodes sequences"),
        ("b0", "b0", "prefill", "NO_OTHER_NODE", "node b0 is the last one that decodes sequences"),
        ("p0 d0", "d0", Shape(0, 8, False), "NO_OTHER_NODE", "without node d0 as it is no node would take the KV"),
        ("p0 d0", "d0", Shape(512, 8, False), "NO_OTHER_NODE", "without node d0 as it is no node would take"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_asked(names, name, to, reason, message):
    world = World(*names.split())
    with pytest.raises(RequestError) as error:
        world.ask(name, to)
    assert error.value.reason == reason
    assert str(error.value).startswith(message)
    assert world.told == []
    assert all(node.requested_shape is None for node in world.registry.nodes)


def test_a_node_that_was_drained_is_given_work_again_with_its_role_though_others_serve_nobody():
    world = World("p0", "p1", "d0")
    world.registry.drain(world.node("p0"))
    assert not world.node("p0").is_ready
    with pytest.raises(RequestError):
        world.ask("p0", "decode_node")
    assert not world.node("p0").is_ready
    world.registry.lose(world.node("p1"))
    assert world.ask("p0", "decode").decodes  # it read nothing any more
    assert world.node("p0").is_ready
    world.registry.drain(world.node("p0"))
    assert world.ask("p0", "decode") is None
    assert (world.node("p0").is_ready, world.node("p0").load.state) == (True, "ready")


def test_a_node_that_stops_takes_no_role():
    world = World("p0", "d0", "d1")
    world.beat(world.node("d1"), state="draining")
    world.registry.drain(world.node("d1"))
    with pytest.raises(RequestError, match="node d1 is stopping, and takes no role any more"):
        world.ask("d1", "mixed")
    assert world.told == []
    assert not world.node("d1").is_ready


def test_nodes_that_drain_or_are_about_to_change_are_no_others():
    world = World("p0", "p1", "d0")
    world.deaf = {"p1"}
    world.ask("p1", "decode")
    with pytest.raises(RequestError, match="node p0 is the last one that prefills prompts"):
        world.ask("p0", "decode")
    world = World("p0", "p1", "d0")
    world.beat(world.node("p1"), state="draining")
    with pytest.raises(RequestError, match="node p0 is the last one that prefills prompts"):
        world.ask("p0", "decode")


def test_every_role_can_be_flipped_there_and_back_and_there_is_always_a_way():
    world, rng = World("p0", "p1", "d0", "d1"), random.Random(5)
    num_flips = 0
    for _ in range(300):
        name, role = rng.choice(["p0", "p1", "d0", "d1"]), rng.choice(["prefill", "decode", "mixed"])
        with contextlib.suppress(RequestError):
            num_flips += world.ask(name, role) is not None
        assert any(node.usable.prefills for node in world.registry.nodes)
        assert any(node.usable.decodes for node in world.registry.nodes)
    assert num_flips > 100


# ---- the coordinator itself ----


def test_a_fixed_fleet_stays_as_it_is():
    world = World("p0", "d0")
    world.queue("p0", 1e9)
    assert world.wait(100.0) == []


def test_a_decode_node_helps_to_read_and_goes_home_when_it_has_been_calm():
    world = World("p0", "d0", "d1", policy=AUTO)
    list(world.write("d0", 1))
    waiting = world.queue("p0", 1500)  # 1.5 s
    assert world.wait(LASTS_S - TICK_S) == []
    assert world.wait(2 * TICK_S) == [("d1", BOTH)]  # the one that holds less
    world.ledger.end(waiting)
    assert world.wait(CALM_S - TICK_S) == []
    assert world.wait(2 * TICK_S) == [("d1", DECODE)]
    assert world.wait(100.0) == []


def test_a_prefill_node_helps_to_write_and_goes_home():
    world = World("p0", "p1", "d0", policy=AUTO)
    world.queue("p0", 100)
    running = list(world.write("d0", 8))
    assert world.wait(LASTS_S + TICK_S) == [("p1", BOTH)]  # the one that has less to read
    for request_id in running[2:]:
        world.ledger.end(request_id)
    assert world.wait(CALM_S + 2 * TICK_S) == [("p1", PREFILL)]


def write_alike(world, name, count, num_tokens=480, tpot_s=math.inf):
    """Answers that begin with the same 464 tokens, of a node that has told of some block."""
    node = world.node(name)
    world.registry.cache_changed(node, events.cache_changed([1]).cache_changed)
    for number in range(count):
        request_id = f"{name} {number}"
        world.ledger.set_due(request_id, Due(tpot_s=tpot_s), 0, 100)
        world.ledger.decode(request_id, node, num_tokens, Prompt([1] * 470).block_hashes(16))
        world.ledger.first_token(request_id, 0.0)


def test_the_decode_node_with_more_room_helps_to_read_however_much_its_answers_share():
    world = World("p0", "d0", "d1", policy=AUTO)
    write_alike(world, "d0", 1, num_tokens=700)
    write_alike(world, "d1", 2)  # 496 in all
    world.queue("p0", 1500)
    assert world.wait(LASTS_S + TICK_S) == [("d1", BOTH)]


def test_steps_read_what_answers_share_for_each_of_them():
    """In steps of 10 ms and 10 us a token before them no more than two answers of 480 tokens keep 20 ms."""
    world = World("p0", "p1", "d0", policy=AUTO)
    write_alike(world, "d0", 2, tpot_s=0.02)
    world.beat(world.node("d0"), step_weights=[0.01, 0.0, 1e-5, 0.0, 0.0, 0.0, 0.0])
    assert world.wait(LASTS_S + TICK_S) == [("p0", BOTH)]


@pytest.mark.parametrize(("is_told", "flips"), [(True, []), (False, [("p0", BOTH)])])
def test_decode_nodes_are_not_full_of_what_their_answers_begin_with_alike(is_told, flips):
    """Of 1600 tokens four hold 480 each, in all of which they are alike but for the last ones: 510 in all."""
    world = World("p0", "p1", "d0", policy=AUTO)
    write_alike(world, "d0", 4)
    if not is_told:
        world.node("d0").numerics_ids.clear()  # as if it had reported no cache
    assert world.wait(LASTS_S + TICK_S) == flips


def test_a_prefill_node_does_not_go_home_while_the_others_would_be_nearly_full_without_it():
    world = World("p0", "p1", "d0", policy=AUTO)
    running = list(world.write("d0", 8))
    assert world.wait(LASTS_S + TICK_S) == [("p0", BOTH)]
    for request_id in running[5:]:
        world.ledger.end(request_id)
    assert world.wait(100.0) == []
    world.ledger.end(running[4])
    assert world.wait(100.0) == [("p0", PREFILL)]


def test_answers_whose_prompts_wait_do_not_make_decode_nodes_full():
    world = World("p0", "d0", policy=AUTO)
    for number in range(20):
        world.ledger.prefill(f"{number}", world.node("p0"), 1000)
        world.ledger.decode(f"{number}", world.node("d0"), 1000)
    assert world.wait(LASTS_S + TICK_S) == [("d0", BOTH)]


@pytest.mark.parametrize(("queued", "writing"), [(900, 5), (100, 7), (5000, 8)])
def test_between_the_limits_nothing_changes(queued, writing):
    """A queue of 0.9 s; decode nodes that are nearly full; prefill nodes and decode nodes that are both full."""
    world = World("p0", "p1", "d0", "d1", policy=AUTO)
    world.queue("p0", queued)
    world.queue("p1", queued)
    for name in ("d0", "d1"):
        list(world.write(name, writing))
    assert world.wait(100.0) == []


def test_half_of_the_time_until_first_tokens_are_due_is_a_long_queue():
    """A prompt of 0.4 s waits."""
    for due_in_s, flips in ((0.7, [("d0", BOTH)]), (LASTS_S + 4.0, [])):
        world = World("p0", "d0", "d1", policy=AUTO)
        world.ledger.set_due("limited", Due(world.now + due_in_s), 0, 10)
        world.ledger.prefill("limited", world.node("p0"), 400)
        world.ledger.decode("limited", world.node("d1"), 400)
        assert world.wait(LASTS_S + 0.5) == flips


def test_decode_nodes_are_full_with_as_many_answers_as_keep_their_limits():
    """Steps of 10 ms and 2 ms for each answer: of 31 ms ten keep their limit, and six of them come and go."""
    for count, flips in ((5, []), (6, [("p0", BOTH)])):
        world = World("p0", "p1", "d0", policy=AUTO)
        for name in ("p0", "p1", "d0"):
            world.beat(world.node(name), step_weights=[0.010, 0.002, 0.0, 0.0, 0.001, 0.0, 0.0])
        for number in range(count):
            world.ledger.set_due(f"{number}", Due(tpot_s=0.031), 0, 10)
            world.ledger.decode(f"{number}", world.node("d0"), 10)
            world.ledger.first_token(f"{number}", 0.0)
        assert world.wait(LASTS_S + 0.5) == flips


def test_one_flip_at_a_time_and_none_while_one_is_not_confirmed():
    world = World("p0", "d0", "d1", "d2", policy=AUTO)
    world.queue("p0", 1e6)
    world.deaf = {"d0"}
    assert world.wait(LASTS_S + CONFIRM_S - TICK_S) == [("d0", BOTH)]
    world.deaf = set()
    assert world.wait(100.0) == [("d0", BOTH), ("d1", BOTH), ("d2", BOTH)]
    times = [now for now, _, _ in world.told]
    assert all(later - earlier >= REST_S for earlier, later in itertools.pairwise(times))


def test_who_is_needed_again_soon_stays_longer_up_to_a_bound_and_later_not():
    world = World("p0", "d0", policy=AUTO)
    stays = []
    for rests_s in (0.0, 0.0, 0.0, 0.0, MAX_STAY_S, 0.0):
        waiting = world.queue("p0", 5000)
        assert world.wait(REST_S + TICK_S) == [("d0", BOTH)]
        lent_s = world.told[-1][0]
        world.ledger.end(waiting)
        while not world.wait(TICK_S):
            assert world.now - lent_s <= MAX_STAY_S + CALM_S
        assert world.told[-1][1:] == ("d0", DECODE)
        stays.append(world.told[-1][0] - lent_s)
        world.wait(rests_s)
    assert stays[0] == stays[5] <= CALM_S + REST_S
    assert stays[1:5] == [4 * MIN_STAY_S, 16 * MIN_STAY_S, MAX_STAY_S, MAX_STAY_S]


def test_those_who_were_lent_go_home_one_by_one():
    world = World("p0", "d0", "d1", "d2", policy=AUTO)
    waiting = world.queue("p0", 1e6)
    assert len(world.wait(LASTS_S + 2 * REST_S + TICK_S)) == 3
    world.ledger.end(waiting)
    assert world.wait(100.0) == [("d0", DECODE), ("d1", DECODE), ("d2", DECODE)]
    times = [now for now, _, _ in world.told[3:]]
    assert [later - earlier for earlier, later in itertools.pairwise(times)] == [MIN_STAY_S, MIN_STAY_S]


def test_home_is_what_an_operator_has_made_of_a_node():
    world = World("p0", "d0", "d1", policy=AUTO)
    home = Shape(64, 4, accepts_transfers=True)
    world.ask("d0", home)
    assert world.wait(100.0) == []
    waiting = world.queue("p0", 5000)
    assert world.wait(LASTS_S + TICK_S) == [("d1", BOTH)]
    world.ledger.end(waiting)
    assert world.wait(100.0) == [("d1", DECODE)]
    assert world.node("d0").shape == home


def test_what_an_operator_makes_of_a_node_that_is_lent_is_its_home_though_it_is_that_already():
    world = World("p0", "d0", policy=AUTO)
    waiting = world.queue("p0", 5000)
    assert world.wait(LASTS_S + TICK_S) == [("d0", BOTH)]
    assert world.ask("d0", "mixed") == BOTH
    assert world.temporary == [True, False]
    world.ledger.end(waiting)
    assert world.wait(100.0) == []


def test_a_coordinator_that_has_begun_anew_sends_home_whom_the_one_before_it_has_lent():
    world = World("p0", "d0", policy=AUTO)
    home = Shape(0, 4, accepts_transfers=True)
    world.attach("d1", shape=BOTH, home=home)
    assert world.wait(100.0) == [("d1", home)]
    assert world.temporary == [False]


def test_a_node_does_not_go_home_while_it_is_the_last_that_reads():
    world = World("p0", "d0", policy=AUTO)
    waiting = world.queue("p0", 5000)
    assert world.wait(LASTS_S + TICK_S) == [("d0", BOTH)]
    world.ledger.end(waiting)
    world.registry.lose(world.node("p0"))
    assert world.wait(100.0) == []
    world.attach("p0")
    assert world.wait(100.0) == [("d0", DECODE)]


@pytest.mark.parametrize(("names", "lost", "lent"), [("p0 d0 d1", "p0", "d1"), ("p0 p1 d0", "d0", "p1")])
def test_a_part_that_nobody_does_any_more_gets_a_node_and_gives_it_back(names, lost, lent):
    world = World(*names.split(), policy=AUTO)
    home = world.node(lent).shape
    list(world.write("d0", 1))  # d1 holds less
    world.queue("p0", 100)  # p1 has less to read
    world.registry.lose(world.node(lost))
    assert world.wait(LACKS_S) == []
    assert world.wait(TICK_S) == [(lent, BOTH)]
    assert world.wait(100.0) == []
    world.attach(lost)
    assert world.wait(CALM_S + TICK_S) == [(lent, home)]


def test_a_part_that_nobody_does_does_not_wait_until_other_changes_are_long_ago():
    world = World("p0", "d0", policy=AUTO)
    waiting = world.queue("p0", 5000)
    assert world.wait(LASTS_S + TICK_S) == [("d0", BOTH)]
    world.ledger.end(waiting)
    assert world.wait(CALM_S + TICK_S) == [("d0", DECODE)]
    world.registry.lose(world.node("p0"))
    assert world.wait(LACKS_S + TICK_S) == [("d0", BOTH)]


def test_nodes_that_are_away_for_a_moment_change_no_roles():
    world = World("p0", "d0", policy=AUTO)
    for _ in range(20):
        world.registry.lose(world.node("p0"))
        assert world.wait(LACKS_S - TICK_S) == []
        world.attach("p0")
        assert world.wait(1.0) == []


def test_a_node_that_comes_and_goes_makes_no_other_go_to_and_fro():
    """For an hour, a minute each. It goes home at the first chance after 15, 60, 240 and then 600 s."""
    world = World("p0", "d0", policy=AUTO)
    for _ in range(30):
        world.registry.lose(world.node("p0"))
        world.wait(60.0)
        world.attach("p0")
        world.wait(60.0)
    lent_s = [now for now, _, shape in world.told if shape == BOTH]
    assert [now - LACKS_S - TICK_S for now in lent_s] == [0.0, 120.0, 240.0, 600.0, 1320.0, 2040.0, 2760.0, 3480.0]


def test_a_node_that_takes_no_shape_is_not_asked_all_the_time():
    world = World("d0", policy=AUTO)
    world.deaf = {"d0"}
    assert len(world.wait(60.0)) <= 60.0 / CONFIRM_S


def test_embeddings_need_nobody_who_writes():
    assert World("p0", "p1", policy=AUTO, embeds=True).wait(100.0) == []
    assert World("d0", policy=AUTO, embeds=True).wait(LACKS_S + 2 * TICK_S) == [("d0", BOTH)]


def test_a_request_waits_until_the_node_that_is_left_reads_too(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("d0",), roles=AUTO, node_wait_s=DEADLINE_S) as c:
            call, d0 = c.generate(max_tokens=2), c.nodes["d0"]
            asked = (await d0.command("reshape")).shape
            assert asked.prompt_tokens > 0
            await d0.send(events.heartbeat(shape=asked))
            reserve = await d0.command("reserve")
            assert reserve.local_prefill
            await d0.send(events.first_token(events.sampled(reserve.job.attempt, 0, ord("a"))))
            await step(d0, reserve.job.attempt, 1, "b", events.LENGTH)
            assert (await read_all(call))[0] == "ab"

    run(scenario())
