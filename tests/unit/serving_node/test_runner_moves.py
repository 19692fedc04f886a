"""Whole nodes over a real loopback network, between which prompts are handed over and running sequences move."""

import asyncio
from dataclasses import replace
from itertools import product

import pytest

from protos import fleet_pb2
from serving_core import reasons
from tests.effort import few
from tests.tiny_models import VOCAB_SIZE
from tests.unit.serving_node.runner_kit import (
    MigratingRequest,
    answer_on_paper,
    by_name,
    carry_descriptors,
    fleet,
    job,
    make_request,
    running,
    told,
)

# ---- KV transfers ----


async def test_one_node_reads_and_another_writes(tmp_path):
    async with fleet(tmp_path, "reader", "writer") as (reader, writer):
        carry_descriptors(writer, reader)
        prompt = list(range(30, 43))
        request = make_request("a", prompt)
        reader.prefill(request)
        writer.reserve(request)
        await writer.until_told("a", "committed")
        await writer.idle()
        await reader.idle()
        first, *rest = answer_on_paper(prompt, 4)
        assert reader.of("a") == [("first_token", first), ("transferred", None)]
        assert writer.of("a") == [
            ("reserved", None),
            ("committed", None),
            *(("step_tokens", token) for token in rest),
        ]
        num_bytes = 4 * writer.engine.layout.block_bytes
        assert writer.event("a", "committed").num_bytes == num_bytes
        assert reader.event("a", "transferred").num_bytes == num_bytes
        assert reader.load.num_kv_bytes == writer.load.num_kv_bytes == num_bytes


async def test_both_ways_at_once_beside_answers_of_their_own(tmp_path):
    async with fleet(tmp_path, "x", "y", num_blocks=24, max_num_batched_tokens=16, max_num_seqs=4) as nodes:
        x, y = nodes
        carry_descriptors(x, y)
        carry_descriptors(y, x)
        written = {x: [], y: []}
        for index in range(6):
            for reader, writer in ((x, y), (y, x)):
                name, prompt = f"{reader.name}{index}", range(7 * index, 7 * index + 9 + 3 * index)
                request = make_request(name, prompt, max_tokens=9)
                reader.prefill(request)
                writer.reserve(request)
                written[writer].append((reader, name, prompt))
                reader.local(f"own {name}", prompt, max_tokens=5)
        for node in nodes:
            await node.idle()
        for writer in nodes:
            for reader, name, prompt in written[writer]:
                first, *rest = answer_on_paper(prompt, 9)
                assert reader.of(name) == [("first_token", first), ("transferred", None)]
                assert [token for _, token in writer.of(name) if token is not None] == rest
                assert reader.of(f"own {name}") == told(answer_on_paper(prompt, 5))


async def test_blocks_that_the_writer_has_already_do_not_travel(tmp_path):
    async with fleet(tmp_path, "reader", "writer") as (reader, writer):
        carry_descriptors(writer, reader)
        writer.local("before", range(10))
        await writer.idle()
        request = make_request("a", [*range(10), 50, 51, 52])
        reader.prefill(request)
        writer.reserve(request)
        await writer.until_told("a", "committed")
        await writer.idle()
        await reader.idle()
        committed, block_bytes = writer.event("a", "committed"), writer.engine.layout.block_bytes
        assert (committed.num_bytes, committed.num_bytes_saved) == (2 * block_bytes, 2 * block_bytes)
        rest = answer_on_paper(request.token_ids, 4)[1:]
        assert [token for _, token in writer.of("a") if token is not None] == rest


async def test_a_grant_is_taken_back_and_the_sender_goes_on_by_the_next_descriptor(tmp_path):
    """The reader's first step is held back, so its KV cannot be there when the writer's old answer needs the blocks."""
    async with fleet(tmp_path, "reader", "writer", gated=True, num_blocks=8, caching=False) as (reader, writer):
        carry_descriptors(writer, reader)
        old = writer.local("old", range(4), max_tokens=25, epoch=1)  # 7 blocks in the end
        await writer.until_step(1)
        request = make_request("young", range(50, 61), epoch=2)  # 3 blocks
        reader.prefill(request)
        await reader.until_step(1)
        writer.reserve(request)
        writer.engine.open()
        await writer.until_told("young", "revoked")
        assert writer.of("young") == [("reserved", None), ("revoked", None)]
        reader.engine.open()
        await writer.until_told("young", "committed")
        await writer.idle()
        await reader.idle()
        assert writer.of("old") == told(answer_on_paper(old.token_ids, 25))
        first, *rest = answer_on_paper(request.token_ids, 4)
        assert writer.of("young")[:4] == [(kind, None) for kind in ("reserved", "revoked", "reserved", "committed")]
        assert [token for _, token in writer.of("young") if token is not None] == rest
        assert reader.of("young") == [("first_token", first), ("transferred", None)]
        assert writer.load.num_transfers_failed == reader.load.num_transfers_failed == 0


@pytest.mark.parametrize("side", ["reader", "writer"])
async def test_a_cancel_at_one_end_of_a_transfer(side, tmp_path):
    async with fleet(tmp_path, "reader", "writer", gated=True) as (reader, writer):
        carry_descriptors(writer, reader)
        request = make_request("a", range(13))
        reader.prefill(request)
        writer.reserve(request)
        await reader.until_step(1)
        ended, other = (reader, writer) if side == "reader" else (writer, reader)
        ended.cancel(request)
        reader.engine.open()
        await ended.until_told("a", "cancelled")
        assert ended.kinds("a")[-1] == "cancelled"
        other.cancel(request)
        await reader.idle()
        await writer.idle()
        assert other.kinds("a")[-1] == "cancelled"


async def test_a_descriptor_that_cannot_be_used_fails_the_prompt(tmp_path):
    async with running(tmp_path) as node:
        request = make_request("a", range(13))
        node.prefill(request)
        node.deliver(request, b"not a descriptor")
        await node.idle()
        assert node.event("a", "failed").reason == reasons.TRANSFER_FAILED


async def test_a_descriptor_that_does_not_come_fails_the_prompt(tmp_path):
    async with running(tmp_path, descriptor_timeout_s=0.1) as node:
        node.prefill(make_request("a", range(13)))
        await node.idle()
        assert node.kinds("a") == ["first_token", "failed"]
        assert node.event("a", "failed").message == "no descriptor came within 0.1 s"


async def test_credit_that_does_not_come_fails_the_request(tmp_path):
    async with running(tmp_path, gated=True, max_num_seqs=1, credit_timeout_s=0.1) as node:
        node.local("there", range(5))
        await node.until_step(1)
        node.reserve(make_request("a", range(13)))
        await node.until_told("a", "failed")
        assert node.event("a", "failed").reason == reasons.QUEUE_FULL
        node.engine.open()
        await node.idle()


async def test_a_sender_that_never_comes_ends_the_grant(tmp_path):
    async with running(tmp_path, reservation_ttl_s=0.1) as node:
        node.reserve(make_request("a", range(13)))
        await node.idle()
        assert node.kinds("a") == ["reserved", "failed"]
        assert node.event("a", "failed").reason == reasons.TRANSFER_FAILED


# ---- moves ----

PLAIN, OF_INT8 = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
KINDS = [PLAIN, OF_INT8, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, {"dtype": "float32"}]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def local(node, request):
    node.handle(reserve=fleet_pb2.Reserve(job=job(request), local_prefill=True))


async def until_idle(*nodes):
    for node in nodes:
        await node.idle()


async def test_an_answer_moves_ten_times_and_every_token_is_told_once(tmp_path):
    async with fleet(tmp_path, "x", "y", num_blocks=128) as (x, y):
        request = make_request("a", PROMPT, max_tokens=160)
        migrating = MigratingRequest(x, y, request, num_migrations=10)
        local(x, request)
        await x.until(lambda: len(migrating.tokens) == 160)
        await until_idle(x, y)
        assert [token.token_id for token in migrating.answer] == answer_on_paper(PROMPT, 160)
        assert len(migrating.next_indexes) == 10
        assert migrating.next_indexes == sorted(migrating.next_indexes)
        assert x.kinds("a").count("committed") == y.kinds("a").count("committed") == 5
        assert x.load.num_kv_bytes == y.load.num_kv_bytes > 0
        assert x.load.num_transfers_failed == y.load.num_transfers_failed == 0


@pytest.mark.parametrize(
    "kind_and_caching",
    few(product(KINDS, [True, False]), (PLAIN, False), (OF_INT8, True)),
    ids=lambda both: "-".join(both[0].values()) + "-caching" * both[1],
)
async def test_logits_after_a_move_are_the_undisturbed_ones_bit_for_bit(kind_and_caching, tmp_path, tiny_model):
    kind, caching = kind_and_caching
    engine = {"model": str(tiny_model), "device": "cpu", **kind}
    options = {"engine": engine, "num_blocks": 128, "caching": caching}

    def asked():
        return make_request("a", PROMPT, max_tokens=70, logprobs=VOCAB_SIZE)

    async with running(tmp_path, **options) as node:
        undisturbed = MigratingRequest(node, node, request := asked(), num_migrations=0)
        local(node, request)
        await node.idle()
    async with fleet(tmp_path, "x", "y", **options) as (x, y):
        migrating = MigratingRequest(x, y, request := asked(), num_migrations=4)
        local(x, request)
        await x.until(lambda: len(migrating.tokens) == 70)
        await until_idle(x, y)
    assert len(migrating.next_indexes) == 4
    for disturbed, expected in zip(migrating.answer, undisturbed.answer, strict=True):
        disturbed.ClearField("attempt")
        expected.ClearField("attempt")
        assert len(expected.top) == VOCAB_SIZE
        assert disturbed == expected, f"token {expected.index} differs"


async def test_both_ways_at_once_beside_a_transfer_in_each(tmp_path):
    """Two answers that swap their nodes again and again, while prompts go both ways."""
    async with fleet(tmp_path, "x", "y", num_blocks=200, max_num_batched_tokens=64, max_num_seqs=8) as (x, y):
        all_migrating = {}
        for name, first, second in (("a", x, y), ("b", y, x)):
            request = make_request(name, [*PROMPT, len(all_migrating)], max_tokens=120)
            all_migrating[name] = MigratingRequest(first, second, request, num_migrations=6)
        for node in (x, y):
            node.on_event = by_name(node, all_migrating, {"c": y, "d": x})
        local(x, all_migrating["a"].request)
        local(y, all_migrating["b"].request)
        for name, reader, writer in (("c", y, x), ("d", x, y)):
            request = make_request(name, [7, *PROMPT], max_tokens=9)
            reader.prefill(request)
            writer.reserve(request)
        await x.until(lambda: all(len(migrating.tokens) == 120 for migrating in all_migrating.values()))
        await until_idle(x, y)
        for name, migrating in all_migrating.items():
            prompt = migrating.request.token_ids[: len(PROMPT) + 1]
            assert [token.token_id for token in migrating.answer] == answer_on_paper(prompt, 120), name
            assert len(migrating.next_indexes) == 6
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
            x.migrate(request, y.event("a", "reserved").descriptor)
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
        x.migrate(request, y.event("a", "reserved").descriptor)
        await y.until(lambda: y.receiver.num_bytes == 2 * y.engine.layout.block_bytes)
        for _ in range(10):
            await asyncio.sleep(0)  # turns of the loop in which the sender hears of that
        x.on_event = lambda event: y.cancel(there) if event.HasField("step_tokens") else None
        x.engine.open()
        await x.until_told("a", "migration_failed")
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
