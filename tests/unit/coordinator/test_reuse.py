"""Prefix reuse and tensor parallelism: who gets a request, what is told and what counted, in the scheduler
and over real gRPC."""

import logging

import grpc
import pytest

from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Registry
from coordinator.control.request_log import RequestLog
from coordinator.control.roles import FIXED, Roles
from coordinator.control.scheduler import Scheduler
from coordinator.dispatcher import Dispatcher
from protos import inference_pb2
from protos.convert import job_to_wire, request_from_wire
from serving_core.requests import SamplingParams
from tests import fleet_events as events
from tests.scripted_nodes import begin, begin_to_write, cluster, read_all, refusal_of, run, step
from tests.unit.coordinator.scheduler_kit import World

TOKENS = list(range(1, 41))  # two full blocks of 16 and eight tokens


class Anything:
    """All that is looked for is in it."""

    def __contains__(self, item):
        return True


@pytest.fixture
def world():
    return World()


@pytest.fixture
def known(world):
    """Both prefill nodes have told of some block."""
    for name in ("p0", "p1"):
        world.holds(name, events.block_hints([5] * 16))
    return world


def finish(world, attempt, decode="d0", index=1):
    assert world.step(attempt, index, events.LENGTH, node=decode)[-1] == "end complete"
    return world.outcome


def test_a_request_goes_where_its_beginning_is(world):
    world.holds("p1", events.block_hints(TOKENS))
    world.holds("d1", events.block_hints(TOKENS)[:1])
    assert world.submit(token_ids=TOKENS) == ["reserve d1", "prefill p1"]
    assert world.account("p1") == (8, 0, 0, 0)  # what is left to compute
    assert world.account("d1") == (0, 40, 1, 1)  # what the pool has to hold


def test_a_prompt_of_which_every_token_is_computed_has_no_beginning_anywhere(world):
    """Of one that is scored, or part of a mean; a later attempt, with tokens, scores nothing any more."""
    world.holds("p1", events.block_hints(TOKENS))
    p1 = world.registry.find("p1")
    prompt = Prompt(TOKENS, is_read_whole=True)
    assert (prompt.tokens_cached(p1), prompt.tokens_to_compute(p1)) == (0, len(TOKENS))
    assert prompt.followed_by([7]).tokens_to_compute(p1) == Prompt([*TOKENS, 7]).tokens_to_compute(p1) < len(TOKENS)


def test_a_cached_beginning_is_left_for_a_shorter_queue(world):
    world.holds("p1", events.block_hints(TOKENS))
    chosen = [world.submit(f"{number}/0", token_ids=TOKENS)[1] for number in range(8)]
    # p1 costs 8 more each time, p0 40 at once and a fifth of 32 for computing them again.
    assert chosen == ["prefill p1"] * 5 + ["prefill p0"] + ["prefill p1"] * 2


def test_prompts_that_begin_alike_and_come_together_are_read_by_one_node(known):
    """The first one in full, of each further one the last block; what the other node has to do is as before."""
    world, prompt = known, [*TOKENS, *TOKENS, 1]
    chosen = [world.submit(f"{number}/0", token_ids=prompt)[1] for number in range(4)]
    assert chosen == ["prefill p0"] * 4
    assert world.account("p0")[0] == 81 + 3 * 1
    assert world.submit("other/0", token_ids=[7, *prompt])[1] == "prefill p1"


def test_of_nodes_that_have_not_reported_their_caches_none_is_taken_to_keep_any(world):
    chosen = [world.submit(f"{number}/0", token_ids=TOKENS)[1] for number in range(4)]
    assert chosen == ["prefill p0", "prefill p1"] * 2
    assert world.account("p0")[0] == 80


def test_nodes_with_empty_caches_compute_a_common_beginning_once(world):
    """Nobody has computed anything yet; prompts that share nothing are divided."""
    for name in ("p0", "p1"):
        world.holds(name, [])
    chosen = [world.submit(f"{number}/0", token_ids=[*TOKENS, *TOKENS, number])[1] for number in range(4)]
    assert chosen == ["prefill p0"] * 4
    assert world.account("p0")[0] == 81 + 3 * 1
    assert world.submit("other/0", token_ids=[7, *TOKENS])[1] == "prefill p1"


def test_what_is_not_alike_is_not_computed_once(known):
    world = known
    for number, told in enumerate(({}, {"cache_salt": "tenant"}, {"adapter": "sql"})):
        world.submit(f"{number}/0", token_ids=TOKENS, **told)
    assert world.account("p0")[0] + world.account("p1")[0] == 3 * 40
    assert Prompt(TOKENS, is_read_whole=True).tokens_to_compute(world.registry.find("p0"), Anything()) == 40


def taken(world, name="d0"):
    return world.ledger.tokens_taken(world.registry.find(name))


@pytest.fixture
def decode_node():
    """One prefill node and one decode node, which have told of some block."""
    world = World(("p0", "d0"), keep_after_s=2.0)
    for name in ("p0", "d0"):
        world.holds(name, events.block_hints([5] * 16))
    return world


def test_what_answers_begin_with_alike_a_decode_node_holds_once(decode_node):
    """All but the last eight tokens of each."""
    for number in range(3):
        decode_node.submit(f"{number}/0", token_ids=TOKENS)
    assert (taken(decode_node), decode_node.account("d0")[1]) == (40 + 2 * 8, 3 * 40)
    for number, told in enumerate(({"cache_salt": "tenant"}, {"adapter": "sql"}), 3):
        decode_node.submit(f"{number}/0", token_ids=TOKENS, **told)
    assert taken(decode_node) == 56 + 2 * 40
    for number in range(5):
        decode_node.scheduler.finish(f"{number}/0", inference_pb2.FINISH_REASON_ABORT, 0.0)
    assert taken(decode_node) == 0
    decode_node.ledger.check_integrity()


def test_of_a_prompt_of_which_every_token_is_computed_nothing_is_held_with_others(decode_node):
    decode_node.submit("0/0", token_ids=TOKENS)
    d0, scored = decode_node.registry.find("d0"), Prompt(TOKENS, is_read_whole=True)
    assert decode_node.ledger.tokens_shared(d0, Prompt(TOKENS)) == 32
    assert decode_node.ledger.tokens_shared(d0, scored) == 0
    times = {"arrived_s": 0.0, "deadline_s": 100.0, "now": 0.0}
    decode_node.short(decode_node.scheduler.submit("1/0", scored, SamplingParams(max_tokens=5), **times))
    assert taken(decode_node) == 2 * 40


def test_what_is_kept_is_held_once_where_it_was_read(decode_node):
    for number in range(2):
        decode_node.submit(f"{number}/0", token_ids=TOKENS)
        decode_node.first(decode_node.attempt)
    assert taken(decode_node, "p0") == 40 + 8, "for the other node"
    assert decode_node.tick(2.0) == ["cancel d0", "keep p0"] * 2
    assert (taken(decode_node, "p0"), taken(decode_node)) == (41 + 9, 0)


def test_one_node_does_not_get_all_that_begins_alike(known):
    """A beginning is computed again where that is earlier by more than it takes from others."""
    world = known
    prompts = [[*TOKENS, *[100 + number] * 40] for number in range(8)]
    chosen = [world.submit(f"{number}/0", token_ids=prompt)[1] for number, prompt in enumerate(prompts)]
    assert chosen.count("prefill p0") == chosen.count("prefill p1") == 4
    assert world.account("p0")[0] + world.account("p1")[0] == 8 * 48 + 2 * 32


def test_a_beginning_is_a_nodes_as_long_as_it_has_it_for_certain(known):
    """Behind that it is its own word that counts, which it gives a little later."""
    world = known
    world.submit(token_ids=TOKENS)
    attempt, p0 = world.attempt, world.registry.find("p0")
    world.first(attempt)
    assert Prompt(TOKENS).tokens_to_compute(p0, world.ledger.prefill_hashes(p0)) == 8
    world.tell("p0", events.transferred(attempt))
    assert Prompt(TOKENS).tokens_to_compute(p0, world.ledger.prefill_hashes(p0)) == 40


def test_a_salted_request_finds_what_has_its_salt(world):
    world.holds("p1", events.block_hints(TOKENS, "tenant"))
    assert world.submit("a/0", token_ids=TOKENS)[1] == "prefill p0"
    world.first(world.attempt)
    assert world.submit("b/0", token_ids=TOKENS, cache_salt="tenant")[1] == "prefill p1"
    assert [job.cache_salt for job in world.jobs] == ["", "", "tenant", "tenant"]
    job = world.jobs[-1]
    assert request_from_wire(job).cache_salt == "tenant"
    assert job.age > world.jobs[0].age
    assert job_to_wire(request_from_wire(job), job.age) == job


def test_an_attempt_and_the_next_one_are_told_the_adapter(world):
    world.submit(token_ids=TOKENS, adapter="sql")
    world.first(world.attempt)
    world.tell("p0", events.transferred(world.attempt))
    world.step(world.attempt, 1)
    world.lose("d0")
    assert [job.adapter for job in world.jobs] == ["sql"] * 4
    job = world.jobs[-1]
    assert request_from_wire(job).adapter == "sql"
    assert job_to_wire(request_from_wire(job), job.age) == job


def test_a_restart_keeps_the_salt_and_looks_for_what_was_answered_too(world):
    answered = [100, 101]
    tokens = TOKENS[:31]
    world.submit(token_ids=tokens, cache_salt="tenant")
    world.first(world.attempt)
    world.tell("p0", events.transferred(world.attempt))
    world.step(world.attempt, 1)
    world.holds("p1", events.block_hints([*tokens, *answered], "tenant"))  # its second block ends in the answer
    world.holds("p0", events.block_hints([*tokens, *answered], "tenant")[:1])
    assert world.lose("d0") == ["reserve d1", "prefill p1"]
    assert world.jobs[-1].cache_salt == "tenant"
    assert list(world.jobs[-1].token_ids) == [*tokens, *answered]
    assert world.account("p1") == (1, 0, 0, 0)


@pytest.mark.parametrize(("tp_size", "told"), [(0, 1), (1, 1), (4, 4)])
def test_the_decode_node_is_told_how_many_ranks_will_send(tp_size, told):
    world = World(nodes=("d0",))
    world.attach("p0", tp_size=tp_size)
    world.submit()
    assert world.prefill_tp_size == told


def test_the_decode_node_is_told_who_will_dial_it():
    world = World(nodes=("d0",))
    world.attach("p0", tp_size=2, kv_keys=[b"a" * 32, b"b" * 32])
    world.submit()
    assert list(world.reserve.sender_keys) == [b"a" * 32, b"b" * 32]


def test_an_answer_tells_what_was_cached_and_what_travelled(world):
    world.submit(token_ids=TOKENS)
    attempt = world.attempt
    world.first(attempt, num_cached_tokens=32)
    assert world.tell("p0", events.transferred(attempt)) == []  # the prefill node's word may come first
    for _ in range(2):  # a repeated report counts once
        assert world.tell("d0", events.committed(attempt, num_bytes=1000, num_bytes_saved=500)) == []
    complete = finish(world, attempt)
    assert (complete.cached_tokens, complete.kv_bytes, complete.kv_bytes_saved) == (32, 1000, 500)


def test_an_answer_of_one_token_has_moved_nothing(world):
    world.submit(token_ids=TOKENS)
    world.first(world.attempt, finish_reason=events.LENGTH, num_cached_tokens=16)
    assert (world.outcome.cached_tokens, world.outcome.kv_bytes, world.outcome.kv_bytes_saved) == (16, 0, 0)


def test_a_moved_answer_adds_its_transfers_up_and_keeps_the_cached_tokens_of_its_first_prefill(world):
    world.submit(token_ids=TOKENS)
    world.first(world.attempt, num_cached_tokens=16)
    world.tell("d0", events.committed(world.attempt, num_bytes=1000, num_bytes_saved=500))
    world.lose("d0")
    world.first(world.attempt, index=1, num_cached_tokens=40)
    world.tell("d1", events.committed(world.attempt, num_bytes=30, num_bytes_saved=7))
    complete = finish(world, world.attempt, "d1", index=2)
    assert (complete.cached_tokens, complete.kv_bytes, complete.kv_bytes_saved) == (16, 1030, 507)


def test_an_answer_adds_up_what_its_nodes_proposed_and_what_came(world):
    world.submit(token_ids=TOKENS)
    world.first(world.attempt)
    early = events.sampled(world.attempt, 2, 102, num_proposed=3, num_accepted=1)
    assert world.tell("d0", events.step_tokens(early)) == []  # waits for the token before it
    assert world.tell("d0", events.step_tokens(events.sampled(world.attempt, 1, 101))) == ["emit 1:101 2:102"]
    assert world.tell("d0", events.step_tokens(early)) == []  # a repeated token counts once
    world.lose("d0")
    world.first(world.attempt, index=3)
    last = events.sampled(world.attempt, 4, 104, events.LENGTH, num_proposed=2, num_accepted=2**32 - 1)
    world.tell("d1", events.step_tokens(last))
    assert (world.outcome.proposed_tokens, world.outcome.accepted_tokens) == (5, 3)


def test_an_attempt_that_gave_no_token_does_not_count_as_the_first_prefill(world):
    world.submit(token_ids=TOKENS)
    world.lose("p0")
    token = events.sampled(world.attempt, 0, 100, events.LENGTH)
    world.tell("p1", events.first_token(token, num_cached_tokens=32))
    assert world.outcome.cached_tokens == 32


def test_an_aborted_answer_tells_what_is_known(world):
    world.submit(token_ids=TOKENS)
    world.first(world.attempt, num_cached_tokens=16)
    world.short(world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 1.0))
    assert (world.outcome.cached_tokens, world.outcome.kv_bytes) == (16, 0)


def test_senseless_figures_of_a_node_do_no_harm(world):
    world.submit(token_ids=TOKENS)
    world.first(world.attempt, num_cached_tokens=2**32 - 1)
    world.tell("d0", events.committed(world.attempt, num_bytes=2**64 - 1, num_bytes_saved=2**64 - 1))
    world.lose("d0")
    world.first(world.attempt, index=1)
    world.tell("d1", events.committed(world.attempt, num_bytes=2**64 - 1, num_bytes_saved=1))
    complete = finish(world, world.attempt, "d1", index=2)
    assert (complete.cached_tokens, complete.kv_bytes, complete.kv_bytes_saved) == (40, 2**64 - 1, 2**64 - 1)


# ---- over real gRPC ----

TEXT = "x" * 40  # one token for each byte: two full blocks of 16 and eight tokens
NODES = ("p0", "p1", "d0", "d1")


def hints(cache_salt=""):
    return events.block_hints([*TEXT.encode()], cache_salt)


async def goes_to(c, prefill, decode, **question):
    """Asks, sees that these nodes get the request, and takes it back. Returns the job."""
    call = c.generate(TEXT, max_tokens=5, **question)
    job = (await c.nodes[decode].command("reserve")).job
    assert (await c.nodes[prefill].command("prefill")).job == job
    call.cancel()
    for name in (prefill, decode):
        await c.nodes[name].answer_cancel(job.attempt)
    await c.until_nothing_is_live()
    return job


def test_a_request_follows_what_nodes_say_they_hold(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=NODES) as c:
            await goes_to(c, "p0", "d0")
            await c.report_blocks("p1", hints())
            await c.report_blocks("d1", hints()[:1])
            await goes_to(c, "p1", "d1")
            await c.report_blocks("d1", removed=hints())
            await goes_to(c, "p1", "d0")
            await c.attach("p1", session=c.nodes["p1"].session)  # a new attachment holds nothing until it says so
            await goes_to(c, "p0", "d0")

    run(scenario())


def test_a_salt_finds_its_own_blocks_alone(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=NODES) as c:
            await c.report_blocks("p1", hints("tenant"))
            assert (await goes_to(c, "p0", "d0")).cache_salt == ""
            assert (await goes_to(c, "p1", "d0", cache_salt="tenant")).cache_salt == "tenant"
            await goes_to(c, "p0", "d0", cache_salt="tenant2")

    run(scenario())


def test_all_answers_of_a_call_have_its_salt(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            await c.report_blocks("p0", hints("tenant"))
            call = c.generate(TEXT, n=2, max_tokens=5, cache_salt="tenant")
            jobs = [(await begin(c))[1] for _ in range(2)]
            assert [job.cache_salt for job in jobs] == ["tenant"] * 2
            call.cancel()

    run(scenario())


def test_a_long_salt_is_refused_by_name(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            code, info, details = await refusal_of(c.generate(cache_salt="x" * 257))
            assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAM")
            assert (info.metadata["field"], details) == (
                "cache_salt", "cache_salt has 257 characters, the limit is 256",
            )  # fmt: skip

    run(scenario())


def test_the_end_of_an_answer_tells_what_was_reused(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(TEXT, max_tokens=2)
            attempt = await begin_to_write(c, num_cached_tokens=32, num_bytes=800, num_bytes_saved=3200)
            await step(c.nodes["d0"], attempt, 1, "b", events.LENGTH)
            _, _, [complete] = await read_all(call)
            assert (complete.prompt_tokens, complete.cached_tokens) == (40, 32)
            assert (complete.kv_bytes, complete.kv_bytes_saved) == (800, 3200)

    run(scenario())


def test_a_node_that_claims_too_many_blocks_stays_and_is_reported(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            await c.report_blocks("p0", range(103))
            await goes_to(c, "p0", "d0")

    run(scenario())
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING and "blocks" in record.message]
    assert record.message == "prefill node p0 says that it holds 103 blocks and has 100: 3 are left out"


@pytest.mark.parametrize("how", ["detached", "replaced"])
def test_what_a_lost_node_still_says_is_ignored(how):
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    ledger, metrics = Ledger(), Metrics()
    limits = {"max_live": 1, "max_restarts": 0, "keep_after_s": 1.0}
    scheduler = Scheduler(registry, ledger, metrics, first_epoch=0, **limits)
    roles = Roles(registry, ledger, policy=FIXED)
    dispatcher = Dispatcher(registry, scheduler, roles, RequestLog(metrics))
    link = dispatcher.attach(events.hello("p0", "prefill").hello)
    if how == "detached":
        dispatcher.detach(link)
    else:
        dispatcher.attach(events.hello("p0", "prefill", session=link.node.session).hello)
    dispatcher.receive(link, events.cache_changed(hints()))
    dispatcher.receive(link, events.heartbeat("draining"))
    assert link.node.hints == set()
    assert [(node.hints, node.is_ready) for node in registry.nodes] == ([] if how == "detached" else [(set(), True)])
