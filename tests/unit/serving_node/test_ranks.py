"""How rank 0 leads its followers: commands, reports, strangers at the port, and what silence means."""

import asyncio
import socket

import pytest
from click.testing import CliRunner

from protos import inference_pb2, ranks_pb2
from serving_core.errors import RankLost, SettingsError
from serving_core.requests import Request, SamplingParams, Share, Work
from serving_core.settings import EngineSettings
from serving_node.process import node_command
from serving_node.ranks import leading
from serving_node.ranks.leading import Followers, Leader, Meeting, RankStream, dial, share_from_wire
from serving_node.ranks.processes import check_world, started_rank
from tests.unit.serving_node.rank_kit import Died, crew, let_die_raise


def _work(epoch=7):
    request = Request("r", epoch, [11, 12, 13, 14, 15], 5, SamplingParams(max_tokens=1), adapter="sql")
    return Work(request, 2, 3, [4, 9])


async def test_commands_reach_every_follower_in_order(monkeypatch):
    async with crew(monkeypatch, 3) as (followers, leaders):
        followers.announce([_work()])
        for epoch in range(50):
            followers.send(cancel_transfer=ranks_pb2.CancelTransfer(epoch=epoch))
        for leader in leaders:
            step = (await leader.command()).step
            assert [share.epoch for share in step.shares] == [7]
            share = share_from_wire(step.shares[0])
            assert share == Share([13, 14, 15], 2, [4, 9], True, adapter="sql")
            assert [(await leader.command()).cancel_transfer.epoch for _ in range(50)] == list(range(50))


async def test_reports_come_with_their_rank(monkeypatch):
    reports = []
    async with crew(monkeypatch, 2, {1: "tcp://one", 2: "tcp://two"}) as (followers, leaders):
        assert followers.kv_addresses == {1: "tcp://one", 2: "tcp://two"}
        followers.on_event = lambda rank, event: reports.append((rank, event.credited.epoch))
        watching = asyncio.create_task(followers.watch())
        leaders[1].send(credited=ranks_pb2.Credited(epoch=5))
        beating = asyncio.create_task(leaders[0].report_load())
        async with asyncio.timeout(60):
            while not (reports and followers.loads):
                await asyncio.sleep(0.01)
        for task in (watching, beating):
            task.cancel()
        await asyncio.gather(watching, beating, return_exceptions=True)
    assert reports == [(2, 5)]
    assert followers.loads[1].kv_pool_bytes == 100
    assert followers.loads[1].rss_bytes > 2**20


async def test_without_followers_there_is_nobody_to_wait_for(monkeypatch):
    async with crew(monkeypatch, 0) as (followers, _):
        followers.announce([_work()])
        followers.stop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await followers.watch()


# ---- losses ----


async def test_a_follower_that_is_gone_ends_the_node(monkeypatch):
    let_die_raise(monkeypatch, "serving_node.ranks.leading")
    async with crew(monkeypatch, 2) as (followers, leaders):
        followers.on_event = lambda rank, event: None
        watching = asyncio.create_task(followers.watch())
        leaders[0].stream.close()
        with pytest.raises(Died, match="ended"):
            async with asyncio.timeout(60):
                await watching


async def test_a_follower_that_says_nothing_ends_the_node(monkeypatch):
    let_die_raise(monkeypatch, "serving_node.ranks.leading")
    monkeypatch.setattr(leading, "LOAD_REPORT_S", 0.02)
    monkeypatch.setattr(leading, "SILENCE_S", 1.0)
    async with crew(monkeypatch, 2) as (followers, leaders):
        followers.on_event = lambda rank, event: None
        beating = asyncio.create_task(leaders[0].report_load())
        with pytest.raises(Died, match="rank 2 has said nothing"):
            async with asyncio.timeout(60):
                await followers.watch()
        beating.cancel()


async def test_a_follower_that_never_comes(monkeypatch):
    monkeypatch.setattr(leading, "HELLO_DEADLINE_S", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(RankLost, match="0 of 1"):
        await Followers(1).gather(lambda data: [data])


async def test_a_follower_hears_that_rank_0_is_gone(monkeypatch):
    async with crew(monkeypatch, 1) as (followers, leaders):
        followers.streams[1].close()
        with pytest.raises(RankLost):
            async with asyncio.timeout(60):
                await leaders[0].command()


async def test_nobody_answers_at_the_port():
    with socket.socket() as bound:  # which does not listen, and keeps others from it
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(RankLost, match="does not answer"):
            await dial(*bound.getsockname(), ranks_pb2.RankCommand)


def test_only_a_broken_model_leaves_the_ranks_in_step(monkeypatch):
    let_die_raise(monkeypatch, "serving_node.ranks.leading")
    followers = Followers(0)
    followers.fail_step(RuntimeError("alone"))


# ---- strangers ----


async def test_strangers_are_sent_away_and_the_follower_is_let_in(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    followers, packed = Followers(1), asyncio.get_running_loop().create_future()
    gathering = asyncio.create_task(followers.gather(lambda data: packed.set_result(data) or [data]))
    meeting = Meeting.decode(await packed)
    hellos = [
        ranks_pb2.RankHello(rank=1, secret=b"guessed".ljust(16)),
        ranks_pb2.RankHello(rank=0, secret=meeting.secret),
        ranks_pb2.RankHello(rank=2, secret=meeting.secret),
    ]
    for hello in hellos:
        stranger = await dial(meeting.host, meeting.port, ranks_pb2.RankCommand)
        stranger.send(ranks_pb2.RankEvent(hello=hello))
        with pytest.raises(RankLost):
            async with asyncio.timeout(60):
                await stranger.receive()
        stranger.close()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x05hello", b""):
        _, writer = await asyncio.open_connection(meeting.host, meeting.port)
        writer.write(garbage)
        writer.close()
    assert not gathering.done()
    leader = await Leader.join(lambda data: [meeting.encode()], "", b"", inference_pb2.RankLoad(rank=1))
    await gathering
    for each in (leader.stream, followers.streams[1]):
        each.close()


async def test_a_message_that_is_too_long_is_not_read():
    ours, theirs = socket.socketpair()
    (reader, writer), (_, hostile) = [await asyncio.open_connection(sock=each) for each in (ours, theirs)]
    leader = Leader(RankStream(reader, writer, ranks_pb2.RankCommand), inference_pb2.RankLoad(rank=1))
    hostile.write((leading.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(RankLost, match="bytes"):
        await leader.command()
    leader.stream.close()
    hostile.close()


async def test_a_follower_that_reads_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(leading, "MAX_MESSAGE_BYTES", 2**20)
    async with crew(monkeypatch, 1) as (followers, _):
        block_ids = list(range(2**20, 2**20 + 50_000))

        def send_without_end():
            while True:
                followers.send(credit=ranks_pb2.Credit(block_ids=block_ids))

        with pytest.raises(RankLost, match="unread"):
            send_without_end()


# ---- who is who ----


def test_a_meeting_is_passed_on_as_bytes():
    meeting = Meeting("fe80::1", 65535, bytes(range(16)))
    assert Meeting.decode(meeting.encode()) == meeting


def ranks(tp_size, pp_size=1):
    return EngineSettings(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)


def test_ranks_of_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert started_rank() is None
    check_world(ranks(4))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert started_rank() == 3
    check_world(ranks(4))
    check_world(ranks(2, 2))
    with pytest.raises(SettingsError, match="--tensor-parallel-size is 2, and 4 processes"):
        check_world(ranks(2))
    sentence = "--tensor-parallel-size is 2, --pipeline-parallel-size is 3, and 4 processes"
    with pytest.raises(SettingsError, match=sentence):
        check_world(ranks(2, 3))
    with pytest.raises(SettingsError, match="64 ranks are the most"):
        check_world(ranks(64, 2))
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(SettingsError, match="RANK is 4, and --tensor-parallel-size is 4"):
        check_world(ranks(4))
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(SettingsError, match="three"):
        started_rank()
    result = CliRunner().invoke(node_command("prefill"), ["/a/folder"])
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: RANK must be a number, not 'three'\n")
