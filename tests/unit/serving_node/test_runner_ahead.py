"""Steps that follow each other without the event loop in a whole node, while requests come and go."""

import gc
import weakref

import pytest

from engine.stepper import NextStep
from protos import fleet_pb2
from tests.effort import effort
from tests.tiny_models import grammar_for_nodes
from tests.unit.serving_node.runner_kit import job, make_request, running

SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3},
    "penalised": {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "guided": {
        "temperature": 1.0,
        "seed": 5,
        "grammar": grammar_for_nodes("regex", "[abc]{30,40}"),
        "ignore_eos": False,
    },
    "stopping": {"stop_token_ids": tuple(range(40, 60))},
}
MAX_TOKENS = 60


def asked(name, **more):
    prompt = [(11 * len(name) + 3 * at) % 200 for at in range(9 + len(name))]
    return make_request(name, prompt, **{"max_tokens": MAX_TOKENS, **SAMPLINGS[name], **more})


async def alone(node, name):
    """Its answer with nobody beside it."""
    send(node, asked(name))
    await node.idle()
    said = node.of(name)
    node.events.clear()
    return said


def send(node, request):
    node.handle(reserve=fleet_pb2.Reserve(job=job(request), local_prefill=True))


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"dtype": "float32", "batch_invariant": True}])
async def test_answers_are_those_of_a_node_that_has_nobody_else(kind, tmp_path, tiny_model):
    options = {
        "engine": {"model": str(tiny_model), "device": "cpu", **kind},
        "num_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    }
    async with running(tmp_path, **options, looks_ahead=False) as node:
        expected = {name: await alone(node, name) for name in SAMPLINGS}
        assert node.engine.num_behind == 0
    async with running(tmp_path, **options) as node:
        node.engine.let_the_loop_look_ahead()
        rounds = effort((5,), (1, 5, 9), (1, 2, 5, 9))
        for first_steps in rounds:
            others = [asked("greedy", max_tokens=200) for _ in range(2)]
            for index, other in enumerate(others):
                other.request_id = f"other {index}"
                send(node, other)
            for name in SAMPLINGS:
                send(node, asked(name))
                num_before = len(node.engine.plans)
                await node.until(lambda at=num_before + first_steps: len(node.engine.plans) >= at)
            node.cancel(others[0])
            await node.until_told("other 0", "cancelled")
            await node.until(lambda: all(len(node.of(name)) == len(expected[name]) for name in SAMPLINGS))
            node.cancel(others[1])
            await node.idle()
            assert {name: node.of(name) for name in SAMPLINGS} == expected
            node.events.clear()
        assert node.engine.num_behind > len(rounds) * MAX_TOKENS / 3


async def test_a_prompt_is_read_in_the_step_behind_the_one_that_runs_when_it_comes(tmp_path):
    async with running(tmp_path, gated=True, max_num_seqs=4, max_num_batched_tokens=64) as node:
        node.local("a", range(5), max_tokens=30)
        for number in range(1, 5):
            await node.until_step(number)
            node.engine.let_one_end()
        await node.until_step(5)
        num_behind = node.engine.num_behind
        assert num_behind > 0
        node.local("b", range(50, 57), max_tokens=3)
        node.engine.let_one_end()
        await node.until_step(6)
        assert {name for name, *_ in node.engine.plans[-1]} == {"a", "b"}
        assert node.engine.num_behind == num_behind
        node.engine.open()
        await node.idle()


async def test_a_step_that_fails_behind_another_fails_its_answers_alone(tmp_path):
    async with running(tmp_path, gated=True, max_num_seqs=4, max_num_batched_tokens=64) as node:
        node.local("a", range(5), max_tokens=30)
        for number in (1, 2, 3):
            await node.until_step(number)
            node.engine.let_one_end()
        await node.until_step(4)
        node.engine.error = ValueError("odd")
        assert node.engine.num_behind > 0
        node.engine.let_one_end()
        await node.until_told("a", "failed")
        assert node.kinds("a") == ["first_token", "step_tokens", "step_tokens", "failed"]
        node.engine.error = None
        node.engine.open()
        node.local("b", range(5), max_tokens=3)
        await node.idle()
        assert [kind for kind, _ in node.of("b")] == ["first_token", "step_tokens", "step_tokens"]


async def test_steps_that_are_over_hold_no_memory(tmp_path, monkeypatch):
    """Without the collector, which does not see how much tensors hold."""
    steps = weakref.WeakSet()
    monkeypatch.setattr("serving_node.step_loop.NextStep", lambda *args, **more: _noted(steps, NextStep(*args, **more)))
    async with running(tmp_path, max_num_seqs=4, max_num_batched_tokens=64) as node:
        node.engine.let_the_loop_look_ahead()
        gc.collect()
        gc.disable()
        try:
            node.local("a", range(5), max_tokens=150)
            await node.until(lambda: node.engine.num_behind > 30)  # of 149
            assert len(steps) < 10
            await node.idle()
        finally:
            gc.enable()


def _noted(steps, step):
    steps.add(step)
    return step
