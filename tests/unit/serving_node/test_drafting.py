"""A draft model between the steps of a node: in the engine's thread, and never what ends an answer."""

import threading

import pytest

from decode_node.drafts import DraftModel
from decode_node.gate import LEAST_STEPS
from engine.stepper import Stepper
from serving_node.drafting import write_ahead
from tests.toy_kv import answer_of
from tests.unit.serving_node.logic_kit import Node, prompt_of

PROMPT = prompt_of(6)
NUM_TOKENS = 16
ENGINE_THREAD = "engine"  # begins its name


class QuickStepper(Stepper):
    """Whatever a busy machine takes for it, a draft model takes next to nothing."""

    async def between(self, compute):
        result, _ = await super().between(compute)
        return result, 0.001


class ToyDrafter:
    """Writes what comes, or fails."""

    def __init__(self, stepper, node, error=None):
        self._stepper, self._node, self._error = stepper, node, error
        self.num_calls = 0

    def write_ahead(self, works):
        assert threading.current_thread().name.startswith(ENGINE_THREAD)
        assert self._stepper.step_age_s > 0, "nobody would see it stuck"
        self.num_calls += 1
        if self._error is not None:
            raise self._error
        (request,) = [resident.request for resident in self._node.logic.residents]
        return [answer_of(request.token_ids, work.num_candidates) for work in works]


@pytest.fixture
def node():
    model = DraftModel(num_blocks=20, block_size=4, max_model_len=100, step_s=0.0)
    node = Node(24, candidates=3, is_history_free=True, draft_model=model)
    node.writes("a", PROMPT, max_tokens=NUM_TOKENS)
    for _ in range(LEAST_STEPS):
        node.step()
    return node


@pytest.fixture
def stepper():
    stepper = QuickStepper(lambda parts, on_layer: None)
    yield stepper
    stepper.close()


async def answered(node, stepper, drafter):
    """Whether the answer is what it would be without."""
    await write_ahead(drafter, node.logic.speculation.drafts, stepper)
    while node.step():
        await write_ahead(drafter, node.logic.speculation.drafts, stepper)
    node.logic.speculation.drafts.check_integrity()
    node.check_empty()
    return node.tokens("a") == answer_of(PROMPT, NUM_TOKENS)[1:]


async def test_what_it_writes_comes(node, stepper):
    drafter = ToyDrafter(stepper, node)
    assert await answered(node, stepper, drafter)
    assert drafter.num_calls > 1
    assert node.logic.speculation.counts.num_accepted > 0
    assert stepper.num_steps == 0, "it takes no step"


async def test_one_that_fails_is_used_no_more(node, stepper, caplog):
    drafter = ToyDrafter(stepper, node, ValueError("odd"))
    assert await answered(node, stepper, drafter)
    assert drafter.num_calls == 1
    assert node.logic.speculation.counts.num_proposed == 0
    assert [record.message for record in caplog.records] == ["the draft model failed: there are no candidates any more"]
