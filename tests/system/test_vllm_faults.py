"""Faults of nodes with real vLLM: whatever strikes, the answers are transformers' and nothing is left behind.

Each fault needs a node started anew, which takes vLLM half a minute on an idle machine: they are for the nightly.
"""

import asyncio
from dataclasses import dataclass

import pytest
import pytest_asyncio

from serving_core.net.ports import SocketFolder
from serving_core.process.failpoints import ENVIRONMENT
from tests.faults.proxy import End, Fault, Proxy
from tests.faults.scene import move_socket
from tests.system.answers import ask_all, request
from tests.system.cluster import wait_until
from tests.system.oracle import Reference
from tests.system.vllm_nodes import DEADLINE_S, MARKS, has_ended, made, processes, prompts, write_model

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]  # in which the proxy runs

NUM_TOKENS = 40
SMALL_POOL = 36  # blocks: the longest prompt and its output take 29


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    model = write_model(tmp_path_factory.mktemp("model"))
    cluster = made(model, tmp_path_factory.mktemp("cluster"), num_prefill=2, num_decode=2)
    cluster.folder.mkdir(exist_ok=True)
    try:
        cluster.start_coordinator()
        yield cluster
    finally:
        cluster.kill_everything()


@pytest.fixture(scope="module")
def reference(cluster):
    return Reference(cluster.model)


async def check_answers(cluster, reference, seed, number=24):
    asked = [request(each, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) for each in prompts(number, seed)]
    async with cluster.connect() as stub:
        answers = await ask_all(stub, asked)
    for each, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == reference.greedy(list(each.tokenized.input_ids), NUM_TOKENS, eos_token_id=-1)
    await asyncio.to_thread(cluster.wait_all_free)


async def restarted(cluster, **nodes):
    """Starts nodes anew with these options, and whatever else does not run; vLLM takes long, so all at once."""
    for name in cluster.names:
        options = nodes.get(name.replace("-", "_"))
        is_running = name in cluster.children and cluster.children[name].is_running
        if is_running and options is not None:
            cluster.kill(name)
        if not is_running or options is not None:
            cluster.start_node(name, **(options or {}))
    await asyncio.to_thread(cluster.wait_complete)


KILLS = [  # of the prefill node, and of the decode node, each at one of its failpoints
    ("on.prefill:3", "after.reserved:3"),
    ("sent:3", "arrived:3"),
    ("after.first_token:3", "commit:3"),
    ("before.transferred:3", "before.committed:3"),
    ("before.first_token:3", "before.step_tokens:5"),
]


@pytest.mark.parametrize("kills", KILLS, ids=" ".join)
async def test_kills_in_any_phase_lose_no_answer(cluster, reference, kills):
    """Of a node's process, or, where a transfer is at the point, of vLLM's worker."""
    prefill_0, decode_0 = ({"env": {ENVIRONMENT: f"{point}=kill"}} for point in kills)
    await restarted(cluster, prefill_0=prefill_0, decode_0=decode_0)
    children = [cluster.expect_end(name) for name in ("prefill-0", "decode-0")]
    running = [process for child in children for process in processes(child)]
    await check_answers(cluster, reference, seed=KILLS.index(kills))
    for child in children:
        await asyncio.to_thread(child.wait, DEADLINE_S)
        assert "failpoint " in child.output()
    wait_until(lambda: has_ended(*running), "all have ended", DEADLINE_S)


@dataclass(frozen=True)
class Harm:
    """What the way to decode-0's data plane does."""

    what: str
    fault: Fault


HARMS = [
    Harm("bits flip", Fault(flip_every=7)),
    Harm("it is cut in silence", Fault(end=End.CUT, after_bytes=400_000)),
    Harm("it is reset in a message", Fault(end=End.RESET, after_bytes=400_000, num_ends=2)),
    Harm("messages are truncated", Fault(end=End.TRUNCATED, after_bytes=400_000, num_ends=3)),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(cluster):
    """All blocks for decode-0 come through it. Both decode nodes have small pools."""
    small = {"vllm": (f"--num-gpu-blocks-override={SMALL_POOL}",)}
    with SocketFolder() as sockets:
        path = sockets.path / "decode-0"
        through = {"kv_bind": f"ipc://{path}", "kv_shared_memory": False}
        await restarted(cluster, decode_0={**small, **through}, decode_1=small)
        async with Proxy(move_socket(path), Fault()).listening(f"ipc://{path}") as proxy:
            yield proxy


async def test_a_full_pool_delays_answers_and_loses_none(cluster, reference, proxy):
    await check_answers(cluster, reference, seed=100)
    assert proxy.num_connections > 0


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.what)
async def test_blocks_that_are_harmed_on_their_way_harm_no_answer(cluster, reference, proxy, harm):
    proxy.struck.clear()
    proxy.fault = harm.fault
    await check_answers(cluster, reference, seed=200 + HARMS.index(harm))
    assert proxy.struck.is_set()
    proxy.fault = Fault()
