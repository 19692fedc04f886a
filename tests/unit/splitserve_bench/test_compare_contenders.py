import os
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from serving_core.errors import SettingsError
from splitserve.launch.models import LocalModel
from splitserve_bench.compare.arena import Arena, warm_up_error
from splitserve_bench.compare.command import parse_engine_flag
from splitserve_bench.compare.contenders import (
    MAX_SPLITS,
    PeerContender,
    contenders,
    parse_custom,
    parse_peer,
    parse_split,
    split,
    splits_of,
)
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.records import PlannedRequest
from tests.tiny_models import write_fake_model
from tests.unit.splitserve_bench.bench_serve_kit import answered
from tests.unit.splitserve_bench.load_servers import Script, http_server
from tests.unit.splitserve_bench.stand_ins import run_load_here

PEER = PeerContender("peer vllm", "http://127.0.0.1:8000")


def names(*arguments):
    return [each.name for each in contenders(*arguments)]


def test_on_two_cores():
    everyone = contenders(2, [], [PEER])
    assert [each.name for each in everyone] == [
        "colocated 1x2",
        "colocated 2x1",
        "split 1P+1D",
        "auto 2x1",
        "peer vllm",
    ]
    one_node, two_nodes, apart, auto, _ = everyone
    assert (one_node.prefill, one_node.decode, one_node.mixed) == (0, 0, 1)
    assert (two_nodes.prefill, two_nodes.decode, two_nodes.mixed) == (0, 0, 2)
    assert (apart.prefill, apart.decode, apart.mixed) == (1, 1, 0)
    assert (auto.prefill, auto.decode, auto.mixed) == (0, 0, 2)
    assert dict(two_nodes.flags) == {"policy": "never"}
    assert dict(auto.flags) == {"admission": "timely"}


def test_one_core_cannot_be_split():
    assert names(1, [], []) == ["colocated 1x1"]


def test_four_cores_have_every_split():
    assert names(4, [], [])[2:] == ["split 1P+3D", "split 2P+2D", "split 3P+1D", "auto 4x1"]


@pytest.mark.parametrize("num_cores", [8, 9, 64, 200])
def test_of_many_splits_some_are_taken_and_the_extremes_are_among_them(num_cores):
    splits = splits_of(num_cores)
    assert len(set(splits)) == MAX_SPLITS
    assert all(each.num_nodes == num_cores for each in splits)
    assert (splits[0].prefill, splits[-1].decode) == (1, 1)


def test_splits_can_be_chosen():
    assert names(4, [split(1, 1), split(1, 1), split(2, 1)], [])[2:] == [
        "split 1P+1D",
        "split 2P+1D",
        "auto 4x1",
    ]
    with pytest.raises(SettingsError, match=r"2P\+3D has more nodes than there are cores: 4"):
        contenders(4, [split(2, 3)], [])


def test_two_peers_of_one_name_are_refused():
    with pytest.raises(SettingsError, match="two contenders have the name peer vllm"):
        contenders(2, [], [PEER, PEER])


def test_splits_and_peers_are_read_from_text():
    assert parse_split("1P+2D") == parse_split("1p+2d") == split(1, 2)
    assert parse_peer("vllm=http://127.0.0.1:8000") == PEER
    assert parse_peer("vllm=http://127.0.0.1:8000/v1/") == PEER
    assert parse_peer("a-b.c=https://host/x").address == "https://host/x"


@pytest.mark.parametrize("text", ["", "1P", "0P+1D", "1P+0D", "1D+1P", "1P+1D+1D", "-1P+1D"])
def test_what_is_no_split_is_refused(text):
    with pytest.raises(ValueError, match="not of the form"):
        parse_split(text)


def flag(text):
    name, _, value = text.partition("=")
    return name, value


def test_further_clusters_have_flags_of_their_own():
    custom = parse_custom("least=1P+1b policy=least-loaded x=1", flag)
    assert (custom.kind, custom.prefill, custom.decode, custom.mixed) == ("custom", 1, 0, 1)
    assert custom.flags == (("policy", "least-loaded"), ("x", "1"))
    assert names(2, [], [PEER])[-1] == "peer vllm"
    assert [each.name for each in contenders(2, [], [PEER], [custom])][-2:] == ["least", "peer vllm"]
    assert parse_custom("three=3B", flag).num_nodes == 3
    with pytest.raises(SettingsError, match="three has more nodes than there are cores: 2"):
        contenders(2, [], [], [parse_custom("three=3B", flag)])


async def test_its_own_flags_reach_the_processes_of_a_cluster(tmp_path):
    """The coordinator refuses a heartbeat that is longer than what it waits for one, before anything is started."""
    model = LocalModel(write_fake_model(tmp_path / "model"), "fake")
    arena = Arena(model, sorted(os.sched_getaffinity(0)), {"heartbeat_s": 1.0, "node_timeout_s": 4.0}, tmp_path, print)
    custom = parse_custom("slow=1B heartbeat-s=5", parse_engine_flag)
    with pytest.raises(SettingsError, match=r"node_timeout_s \(4\) must be above heartbeat_s \(5\)"):
        await arena.run(custom, [], [], max_concurrency=None, request_timeout_s=1.0, on_progress=print)


async def test_a_peer_that_no_longer_answers_after_the_load_is_an_error(tmp_path, monkeypatch):
    model = LocalModel(write_fake_model(tmp_path / "model"), "fake")
    arena = Arena(model, sorted(os.sched_getaffinity(0)), {}, tmp_path, print)
    warm_up, planned = ([PlannedRequest(i, 0.0, (i, 1), 2) for i in range(count)] for count in (1, 3))
    ended = []
    async with AsyncExitStack() as server:
        target = await server.enter_async_context(http_server(Script()))

        async def load(order, requests, *callbacks):
            ended.append([each.error for each in await run_load_here(order, requests, *callbacks)])
            if requests is planned:
                await server.aclose()
            return []

        monkeypatch.setattr("splitserve_bench.compare.arena.run_load", load)
        with pytest.raises(BenchError, match=f"no server answers at {target.address}"):
            await arena.run(
                PeerContender("peer a", target.address),
                warm_up,
                planned,
                max_concurrency=None,
                request_timeout_s=60.0,
                on_progress=lambda progress: None,
            )
    assert ended == [[""], ["", "", ""]]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([], ""), (["", "full!"], ""), (["full!", "full!"], "full"), (["full!", "lost", ""], "lost")],
)
def test_a_warm_up_may_be_refused_in_part(errors, expected):
    """Errors of refusals end with an exclamation mark here."""
    outcomes = [
        replace(answered(index), error=error.rstrip("!"), is_refused=error.endswith("!"))
        for index, error in enumerate(errors)
    ]
    assert warm_up_error(outcomes) == expected


@pytest.mark.parametrize("text", ["", "a", "a=", "=1B", "a=0B", "a=1X", "a=1B+", "a/b=1B", "a=1P", "a=2D"])
def test_what_is_no_cluster_is_refused(text):
    with pytest.raises(ValueError, match=r"not of the form|has no node"):
        parse_custom(text, flag)


@pytest.mark.parametrize("text", ["", "vllm", "vllm=", "=http://x", "vllm=127.0.0.1:8000", "a b=http://x"])
def test_what_is_no_peer_is_refused(text):
    with pytest.raises(ValueError, match="not of the form"):
        parse_peer(text)
