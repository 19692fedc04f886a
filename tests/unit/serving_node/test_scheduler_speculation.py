"""Which answers have draft tokens, and what becomes of a step that has some. What the toy will say is known in advance:
draft tokens are right or wrong as a test wants it."""

import pytest

from decode_node import speculation
from decode_node.speculation import LEAST_STEPS, LONGEST, Lookup
from serving_core.node.costs import StepCosts
from tests.toy_kv import NUM_TOKEN_IDS, answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_SIZE, STEP_S, Node, prompt_of

MOST = 3
PROMPT = prompt_of(6)


@pytest.fixture(autouse=True)
def oracle(monkeypatch):
    """Every text foretells all of its answer, but for the places that are put in here."""
    wrong = set()

    def following(token_ids, place, num_tokens):
        come = answer_of(token_ids, num_tokens)
        return [(each + (len(token_ids) + at in wrong)) % NUM_TOKEN_IDS for at, each in enumerate(come)]

    monkeypatch.setattr(speculation, "following", following)
    monkeypatch.setattr(Lookup, "find", lambda lookup, token_ids: (0, LONGEST))
    return wrong


def writes(name="a", prompt=PROMPT, max_tokens=24, node=None, **options):
    """One whose next step has draft tokens, if any."""
    node = node or Node(**{"num_blocks": 24, "draft_tokens": MOST, "is_batch_invariant": True, **options})
    node.writes(name, prompt, max_tokens=max_tokens)
    for _ in range(LEAST_STEPS):
        node.step()
    return node


def draft_tokens(node):
    """Of the step that now runs, by name."""
    node.begin()
    return {work.request.request_id: len(work.draft_tokens) for work in node.works}


def test_those_that_come_are_told_in_one_step_in_order():
    node = writes()
    num_known = len(node.tokens("a"))
    assert draft_tokens(node) == {"a": MOST}
    node.end()
    assert len(node.tokens("a")) == num_known + 1 + MOST
    (last,) = [event.step_tokens for event in node.events[-1:]]
    assert (len(last.tokens), last.step_s) == (1 + MOST, STEP_S)
    node.steps()
    assert node.tokens("a") == answer_of(PROMPT, 24)[1:]
    assert node.finish_reasons("a")[-1] != 0
    node.check_empty()


def test_behind_a_wrong_one_nothing_is_told(oracle):
    node = writes()
    num_known = len(PROMPT) + 1 + len(node.tokens("a"))
    oracle.add(num_known + 1)
    assert draft_tokens(node) == {"a": MOST}
    node.end()
    assert len(PROMPT) + 1 + len(node.tokens("a")) == num_known + 2
    counts = node.scheduler.speculation.counts
    assert (counts.num_drafts, counts.num_proposed, counts.num_accepted) == (1, MOST, 1)
    node.steps()
    assert node.tokens("a") == answer_of(PROMPT, 24)[1:]
    node.check_empty()


def test_steps_count_every_token_and_costs_only_those_without():
    costs = NotedCosts()
    node = writes(costs=costs)
    before, learned = node.scheduler.steps.num_output_tokens, len(costs.loads)
    assert learned
    node.step()
    assert node.scheduler.steps.num_output_tokens == before + 1 + MOST
    assert len(costs.loads) == learned


class NotedCosts(StepCosts):
    """Notes the steps that it learns from."""

    def __init__(self):
        super().__init__()
        self.loads = []

    def add(self, load, step_s):
        self.loads.append(load)
        super().add(load, step_s)


def test_an_answer_never_gets_more_than_it_may_have():
    node = writes(max_tokens=LEAST_STEPS + 4)  # 3 are left: this step gives one, so 2 draft tokens
    assert draft_tokens(node) == {"a": 2}
    node.end()
    assert node.tokens("a") == answer_of(PROMPT, LEAST_STEPS + 4)[1:]
    node.check_empty()


def test_none_of_them_may_end_it():
    """What stops the answer is the token that comes third from here: one draft token stands before it, at most."""
    answer = answer_of(PROMPT, 24)
    num_before = 1 + LEAST_STEPS
    behind = answer[num_before : num_before + MOST]
    node = Node(24, draft_tokens=MOST, is_batch_invariant=True)
    node.writes("a", PROMPT, max_tokens=24, stop_token_ids=(behind[-1],), min_tokens=20)
    for _ in range(LEAST_STEPS):
        node.step()
    assert draft_tokens(node) == {"a": behind.index(behind[-1])}


@pytest.mark.parametrize("options", [{"draft_tokens": 0}, {"is_batch_invariant": False}])
def test_there_are_none_where_they_are_off_or_could_change_bits(options):
    assert draft_tokens(writes(**options)) == {"a": 0}


def test_a_step_that_reads_a_prompt_has_none():
    node = writes(budget=8)
    node.local("b", 12, max_tokens=2)
    assert draft_tokens(node) == {"a": 0, "b": 0}


def test_an_answer_that_moves_has_none_and_takes_those_of_its_step_along():
    node = writes()
    request = next(iter(node.scheduler.node_requests)).request
    assert draft_tokens(node) == {"a": MOST}
    node.migrate(request, num_known=len(PROMPT))
    node.end()
    assert draft_tokens(node) == {"a": 0}
    node.end()
    node.caught_up(request)
    assert node.sending[request.epoch].is_finished
    told = node.tokens("a")
    assert told == answer_of(PROMPT, 24)[1 : 1 + len(told)]


def test_one_does_not_move_where_its_step_may_need_more_blocks_than_were_granted():
    node = writes()
    (node_request,) = node.scheduler.node_requests
    assert draft_tokens(node) == {"a": MOST}
    num_blocks = -(-(node_request.num_computed + 1) // BLOCK_SIZE)
    node.migrate(node_request.request, num_blocks=num_blocks, num_known=len(PROMPT))
    is_refused = node_request.num_computed + 1 + MOST > num_blocks * BLOCK_SIZE
    assert ("migration_failed" in node.words("a")) == is_refused
    assert is_refused


def test_draft_tokens_take_only_blocks_that_nobody_else_would_get():
    """6 + 1 + 4 tokens are 11: in 3 blocks there is room for one more. With all others taken it has to do with that."""
    node = writes(num_blocks=24)
    assert draft_tokens(node) == {"a": MOST}
    full = Node(4, draft_tokens=MOST, is_batch_invariant=True)
    writes(node=full, max_tokens=10)
    (node_request,) = full.scheduler.node_requests
    taken = full.allocator.allocate(full.num_free)
    room = len(node_request.lease.block_ids) * BLOCK_SIZE - node_request.num_computed - 1
    assert room < MOST
    assert draft_tokens(full) == {"a": room}
    full.end()
    taken.release()
    full.steps()
    assert full.tokens("a") == answer_of(PROMPT, 10)[1:]


def test_the_budget_of_a_step_counts_them():
    """Answers of which each could have 3 share what 10 tokens leave: 7 of the first two and none of the third."""
    node = Node(40, budget=10, draft_tokens=MOST, is_batch_invariant=True)
    for name in "abc":
        node.writes(name, PROMPT, max_tokens=24)
    for _ in range(LEAST_STEPS):
        node.step()
    assert draft_tokens(node) == {"a": 3, "b": 3, "c": 1}
    node.end()
    node.steps()
    assert {tuple(node.tokens(name)) for name in "abc"} == {tuple(answer_of(PROMPT, 24)[1:])}


def test_one_that_is_cancelled_in_the_step_says_no_more():
    node = writes()
    request = next(iter(node.scheduler.node_requests)).request
    told = node.tokens("a")
    node.begin()
    node.cancel(request)
    node.end()
    assert node.tokens("a") == told
    node.check_empty()


def test_one_whose_step_fails_leaves_nothing_behind():
    node = writes()
    node.begin()
    node.fail_step()
    assert node.words("a")[-1] == "failed"
    node.check_empty()
