"""Nodes with the fake engine keep answers to their grammars, wherever these are read, written and taken over.

Of the tokens that may come, the fake model's likeliest is the next one from its own choice on.
"""

import asyncio
import json

import pytest

from serving_node import runner
from tests.tiny_models import EOS, VOCAB_SIZE, grammar_for_nodes
from tests.unit.serving_node.runner_kit import (
    DEADLINE_S,
    answer_on_paper,
    carry_descriptors,
    fleet,
    make_request,
    running,
    told,
)

GRAMMAR = grammar_for_nodes("regex", "(abc|xyz){4}")
LENGTH = 13  # with the end token
ASKED = {"max_tokens": 40, "ignore_eos": False, "grammar": GRAMMAR}
PROMPT = list(range(10))


def kept_on_paper(prompt, so_far=()):
    """The answer behind what is there of it."""
    answer = [*so_far]
    while len(answer) < LENGTH:
        [own] = answer_on_paper([*prompt, *answer], 1)
        answer.append(min(options(answer), key=lambda token: (token - own) % VOCAB_SIZE))
    return answer[len(so_far) :]


def options(answer):
    at = len(answer) % 3
    if len(answer) == LENGTH - 1:
        return [EOS]
    return [*b"ax"] if at == 0 else [b"abc"[at] if answer[-at] == ord("a") else b"xyz"[at]]


async def test_a_local_answer_keeps_to_its_grammar_and_others_do_as_before(tmp_path):
    async with running(tmp_path, max_num_seqs=4, max_num_batched_tokens=16) as node:
        node.local("plain", PROMPT, max_tokens=20)
        node.local("a", PROMPT, **ASKED)
        node.local("b", PROMPT[::-1], **ASKED)
        await node.idle()
        assert node.of("a") == told(kept_on_paper(PROMPT))
        assert node.of("b") == told(kept_on_paper(PROMPT[::-1]))
        assert node.of("plain") == told(answer_on_paper(PROMPT, 20))


async def test_both_halves_keep_to_it(tmp_path):
    async with fleet(tmp_path, "reader", "writer") as (reader, writer):
        request = make_request("a", PROMPT, **ASKED)
        carry_descriptors(writer, reader)
        reader.prefill(request)
        writer.reserve(request)
        await reader.idle()
        await writer.idle()
        first, *rest = kept_on_paper(PROMPT)
        assert ("first_token", first) in reader.of("a")
        assert [token for kind, token in writer.of("a") if kind == "step_tokens"] == rest


@pytest.mark.parametrize("num_known", [1, 2, 3, 11, 12])
async def test_an_answer_that_begins_again_goes_on_within_it(tmp_path, num_known):
    known = kept_on_paper(PROMPT)[:num_known]
    async with running(tmp_path) as node:
        node.local("a", [*PROMPT, *known], num_prompt_tokens=len(PROMPT), **ASKED)
        await node.idle()
        assert node.of("a") == told(kept_on_paper(PROMPT, known))


async def test_an_answer_that_gave_way_goes_on_within_it(tmp_path):
    names = ["a", "b", "c"]
    limits = {"num_blocks": 9, "caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    async with running(tmp_path, gated=True, **limits) as node:
        for name in names:
            node.local(name, PROMPT, **{**ASKED, "max_tokens": 20})
        await node.until(lambda: node.load.num_running + node.load.num_waiting == len(names))  # compiled, all of them
        node.engine.open()
        await node.idle()
        assert node.load.num_preemptions > 0, "nobody gave way"
        for name in names:
            assert node.of(name) == told(kept_on_paper(PROMPT))


async def test_tokens_that_are_not_of_the_grammar_are_the_clients_mistake_alone(tmp_path):
    async with running(tmp_path, max_num_seqs=4, max_num_batched_tokens=32) as node:
        node.local("wrong", [*PROMPT, *b"ab!"], num_prompt_tokens=len(PROMPT), **ASKED)
        node.local("right", PROMPT, **ASKED)
        await node.idle()
        failed = node.event("wrong", "failed")
        assert failed.reason == "BAD_PARAM"
        assert failed.message.startswith("the grammar does not allow of the 3 tokens so far: ")
        assert node.of("right") == told(kept_on_paper(PROMPT))


async def test_a_grammar_that_does_not_compile_is_refused(tmp_path):
    async with running(tmp_path) as node:
        node.local("a", PROMPT, **{**ASKED, "grammar": GRAMMAR.partition(" ")[0] + " {"})
        await node.idle()
        assert node.kinds("a") == ["failed"]
        assert node.event("a", "failed").reason == "BAD_PARAM"


async def test_a_node_with_another_vocabulary_keeps_no_answer_to_a_grammar(tmp_path):
    """Its masks would let other tokens come than those that the coordinator reads."""
    async with running(tmp_path) as node:
        swap_tokens(tmp_path / "fake", "a", "b")
        node.local("a", PROMPT, **ASKED)
        node.local("plain", PROMPT, max_tokens=5)
        await node.idle()
        assert node.kinds("a") == ["failed"]
        assert node.event("a", "failed").reason == "PAIRING_MISMATCH"
        assert node.of("plain") == told(answer_on_paper(PROMPT, 5))


async def test_a_node_reads_its_tokenizer_in_a_quiet_moment(tmp_path, monkeypatch):
    """For which the first grammar would hold up its answers."""
    monkeypatch.setattr(runner, "QUIET_S", 0.0)
    async with running(tmp_path) as node:
        async with asyncio.timeout(DEADLINE_S):
            while not node.engine.grammars.is_loaded:
                await asyncio.sleep(0.001)
        (tmp_path / "fake" / "tokenizer.json").unlink()
        node.local("a", PROMPT, **ASKED)
        await node.idle()
        assert node.of("a") == told(kept_on_paper(PROMPT))


async def test_a_node_that_is_busy_has_no_quiet_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "QUIET_S", 0.0)
    async with running(tmp_path, gated=True) as node:
        node.local("plain", PROMPT, max_tokens=5)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not node.engine.grammars.is_loaded
        node.engine.open()
        await node.idle()


def swap_tokens(folder, one, other):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(tokenizer))
