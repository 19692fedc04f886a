"""Whole nodes between which a running answer moves, over a real loopback network."""

import asyncio
from dataclasses import replace

import pytest

from protos import fleet_pb2
from tests.tiny_models import VOCAB_SIZE, write_tiny_model
from tests.unit.serving_node.runner_kit import (
    Mover,
    answer_on_paper,
    by_name,
    fleet,
    job,
    make_request,
    running,
    told,
)

KINDS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def local(node, request):
    node.handle(reserve=fleet_pb2.Reserve(job=job(request), local_prefill=True))


async def until_idle(*nodes):
    for node in nodes:
        await node.idle()


async def test_an_answer_moves_ten_times_and_every_token_is_told_once(tmp_path):
    async with fleet(tmp_path, "x", "y", num_blocks=128) as (x, y):
        request = make_request("a", PROMPT, max_tokens=300)
        mover = Mover(x, y, request, num_moves=10)
        local(x, request)
        await x.until(lambda: len(mover.tokens) == 300)
        await until_idle(x, y)
        assert [token.token_id for token in mover.answer] == answer_on_paper(PROMPT, 300)
        assert len(mover.next_indexes) == 10
        assert mover.next_indexes == sorted(mover.next_indexes)
        assert x.kinds("a").count("committed") == y.kinds("a").count("committed") == 5
        assert x.load.num_kv_bytes == y.load.num_kv_bytes > 0
        assert x.load.num_transfers_failed == y.load.num_transfers_failed == 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
@pytest.mark.parametrize("caching", [True, False])
async def test_logits_after_a_move_are_the_undisturbed_ones_bit_for_bit(kind, caching, tmp_path):
    engine = {"model": str(write_tiny_model(tmp_path / "tiny")), "device": "cpu", **kind}
    options = {"engine": engine, "num_blocks": 128, "caching": caching}

    def asked():
        return make_request("a", PROMPT, max_tokens=120, logprobs=VOCAB_SIZE)

    async with running(tmp_path, **options) as node:
        undisturbed = Mover(node, node, request := asked(), num_moves=0)
        local(node, request)
        await node.idle()
    async with fleet(tmp_path, "x", "y", **options) as (x, y):
        mover = Mover(x, y, request := asked(), num_moves=4)
        local(x, request)
        await x.until(lambda: len(mover.tokens) == 120)
        await until_idle(x, y)
    assert len(mover.next_indexes) == 4
    for disturbed, expected in zip(mover.answer, undisturbed.answer, strict=True):
        disturbed.ClearField("attempt")
        expected.ClearField("attempt")
        assert len(expected.top) == VOCAB_SIZE
        assert disturbed == expected, f"token {expected.index} differs"


async def test_both_ways_at_once_beside_a_hand_over_in_each(tmp_path):
    """Two answers that swap their nodes again and again, while prompts go both ways."""
    async with fleet(tmp_path, "x", "y", num_blocks=200, max_num_batched_tokens=64, max_num_seqs=8) as (x, y):
        movers = {}
        for name, first, second in (("a", x, y), ("b", y, x)):
            request = make_request(name, [*PROMPT, len(movers)], max_tokens=120)
            movers[name] = Mover(first, second, request, num_moves=6)
        for node in (x, y):
            node.on_event = by_name(node, movers, {"c": y, "d": x})
        local(x, movers["a"].request)
        local(y, movers["b"].request)
        for name, reader, writer in (("c", y, x), ("d", x, y)):
            request = make_request(name, [7, *PROMPT], max_tokens=9)
            reader.prefill(request)
            writer.reserve(request)
        await x.until(lambda: all(len(mover.tokens) == 120 for mover in movers.values()))
        await until_idle(x, y)
        for name, mover in movers.items():
            prompt = mover.request.token_ids[: len(PROMPT) + 1]
            assert [token.token_id for token in mover.answer] == answer_on_paper(prompt, 120), name
            assert len(mover.next_indexes) == 6
        told = [token for node in (x, y) for name in "cd" for _, token in node.of(name) if token is not None]
        assert sorted(told) == sorted(2 * answer_on_paper([7, *PROMPT], 9))


@pytest.mark.parametrize("moment", ["when it has credit", "while it is sent"])
async def test_one_that_is_kept_goes_on_as_if_nothing_had_been(moment, tmp_path):
    """The other node has let go first, as the coordinator sees to."""
    async with fleet(tmp_path, "x", "y", gated=True, num_blocks=64) as (x, y):
        local(x, request := make_request("a", PROMPT, max_tokens=40))
        for number in range(1, 4):
            await x.until_step(number)
            x.engine.let_one_end()
        await x.until_step(4)
        y.reserve(there := replace(request, epoch=request.epoch + 10**6), ahead=20)
        await y.until_told("a", "reserved")
        if moment != "when it has credit":
            x.migrate(request, y.event("a", "reserved").ticket)
            await y.until(lambda: y.receiver.num_bytes > 0)
        y.cancel(there)
        await y.until_told("a", "cancelled")
        x.keep(request)
        x.engine.open()
        await until_idle(x, y)
        assert [token for _, token in x.of("a") if token is not None] == answer_on_paper(PROMPT, 40)
        assert "committed" not in y.kinds("a")


async def test_one_that_has_stopped_waits_for_the_word_and_then_goes_on(tmp_path):
    """The other node gives up as soon as it hears of the last token before the stop."""
    async with fleet(tmp_path, "x", "y", gated=True, num_blocks=64) as (x, y):
        local(x, request := make_request("a", PROMPT, max_tokens=40))
        await x.until_step(1)
        x.engine.let_one_end()
        await x.until_step(2)
        y.reserve(there := replace(request, epoch=request.epoch + 10**6), ahead=20)
        await y.until_told("a", "reserved")
        x.migrate(request, y.event("a", "reserved").ticket)
        await y.until(lambda: y.receiver.num_bytes == 2 * y.engine.layout.block_bytes)
        for _ in range(10):
            await asyncio.sleep(0)  # turns of the loop in which the sender hears of that
        x.on_event = lambda event: y.cancel(there) if event.HasField("step_tokens") else None
        x.engine.open()
        await x.until_told("a", "move_failed")
        x.on_event = None
        await asyncio.sleep(0.05)
        assert len(x.engine.plans) == 2
        x.keep(request)
        await until_idle(x, y)
        assert [token for _, token in x.of("a") if token is not None] == answer_on_paper(PROMPT, 40)
        assert "committed" not in y.kinds("a")


async def test_a_prompt_is_answered_where_it_was_read(tmp_path):
    async with fleet(tmp_path, "reader", "writer", gated=True, num_blocks=8) as (reader, writer):
        writer.local("old", range(4), max_tokens=20)
        await writer.until_step(1)
        writer.reserve(request := make_request("a", [*PROMPT, *PROMPT], max_tokens=9))
        reader.prefill(request)
        reader.engine.open()
        await reader.until_told("a", "first_token")
        assert writer.kinds("a") == []
        writer.cancel(request)
        await writer.until_told("a", "cancelled")
        reader.keep(request)
        writer.engine.open()
        await until_idle(reader, writer)
        assert reader.of("a") == told(answer_on_paper([*PROMPT, *PROMPT], 9))
