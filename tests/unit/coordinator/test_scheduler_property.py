"""The scheduler in a small world of nodes whose messages arrive in any order that ordered streams allow.

Whatever is cancelled, lost, late, failing or moving: every request ends exactly once, its tokens are those it must
have, in order, its phases add up, and in the end no node holds anything.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.control.request import Request
from protos import inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from tests.effort import effort, few
from tests.state_table import PAGE, arcs, page
from tests.unit.coordinator.protocol_world import World, token_of

OFTEN = ("submit", "deliver_command", "deliver_event", "step")
MIGRATIONS = ("drain", "drain", "drain", "revoke", "spoil")
RARE = ("fail", "lose", "abort", "wait", *MIGRATIONS)
REFUSALS = (reasons.WOULD_BE_LATE, reasons.NO_PREFILL_WORKER, reasons.NO_DECODE_WORKER)  # of what was held


def play(seed, trouble):
    world = World(Random(seed))
    busy = ("deliver_command", "deliver_event", "step")
    world.run([*OFTEN * 12, *busy * 12, *trouble * 2, "wait", "flip", "flip"], effort(300, 500, 500))
    world.settle()
    return world


@pytest.mark.parametrize("trouble", few([(), MIGRATIONS, RARE], RARE), ids=["no trouble", "migrations", "everything"])
@given(seed=st.integers(0, 2**32))
def test_every_request_ends_once_with_the_right_tokens_and_nothing_is_held(trouble, seed):
    world = play(seed, trouble)
    assert world.ends.keys() == world.submitted.keys()
    assert world.scheduler.num_open == 0
    world.ledger.check_integrity()
    for node in world.nodes:
        assert node.held == {}
        assert (world.scheduler.num_left(node.node), world.ledger.of(node.node).num_sequences) == (0, 0)
    for request_id, (max_tokens, arrived_s) in world.submitted.items():
        outcome, ended_s = world.ends[request_id]
        tokens = world.tokens[request_id]
        assert tokens == [token_of(request_id, index) for index in range(len(tokens))]
        if isinstance(outcome, RequestError):
            assert trouble == RARE or (outcome.reason in REFUSALS and not tokens)
            continue
        check_complete(outcome, len(tokens), max_tokens, ended_s - arrived_s)
        assert trouble == RARE or outcome.timeline.num_restarts == 0  # a move that fails costs nothing


def test_moves_of_every_outcome_and_requests_that_are_held_are_among_them():
    migrations, num_kept, num_held = Counter(), 0, 0
    for seed in range(effort(30, 60, 60)):
        world = play(seed, RARE if seed % 2 else MIGRATIONS)
        migrations += world.migrations
        num_kept += world.metrics.num_kept
        num_held += world.most_held
    assert min(migrations[outcome] for outcome in ("migrated", "refused", "failed", "ended")) >= effort(5, 10, 10), (
        migrations
    )
    assert num_kept >= effort(2, 5, 5)
    assert num_held >= effort(3, 6, 6)


def test_requests_take_no_other_way_than_the_table_has(monkeypatch):
    enter, seen = Request.enter, set()

    def enter_and_record(request, state, now, **options):
        seen.add((request.state, state))
        enter(request, state, now, **options)

    monkeypatch.setattr(Request, "enter", enter_and_record)
    for seed in range(effort(20, 40, 200)):
        play(seed, RARE if seed % 2 else MIGRATIONS)
    changes = {(before, after) for before, after in seen if before is not after}
    assert changes <= arcs().keys()
    assert len(changes) >= effort(25, 27, 30), sorted(arcs().keys() - changes)


def test_the_page_of_the_docs_draws_the_table():
    assert PAGE.read_text() == page(), "python -m tests.state_table draws it"


def check_complete(complete, num_tokens, max_tokens, e2e_s):
    assert complete.completion_tokens == num_tokens
    if complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH:
        assert num_tokens == max_tokens
    timeline = complete.timeline
    phases = [
        timeline.prefill_queue_s, timeline.prefill_s, timeline.kv_alloc_s,
        timeline.kv_transfer_s, timeline.decode_queue_s, timeline.decode_s,
    ]  # fmt: skip
    assert min(phases) >= 0
    assert sum(phases) == timeline.e2e_s == pytest.approx(e2e_s)
    assert 0 <= timeline.ttft_s <= timeline.e2e_s + 1e-9
    assert 0 <= timeline.migration_pause_s <= timeline.e2e_s + 1e-9
    assert complete.migrated_kv_bytes == 10 * timeline.num_migrations <= complete.kv_bytes
