"""Nodes with vLLM: real vLLM, in the environment that `make vllm` makes, against transformers.

vLLM starts in half a minute on an idle machine and in some on a busy one, so few clusters serve many tests.
"""

import asyncio
import random
import signal
import subprocess
import sys

import psutil
import pytest

from splitserve import Client
from tests.system.answers import ask_all, request
from tests.system.cluster import free_port, wait_until
from tests.system.greedy import check_greedy_answers
from tests.system.oracle import Reference
from tests.system.vllm_nodes import (
    DEADLINE_S,
    FLAGS,
    MARKS,
    POOL,
    PYTHON,
    STEP_TIMEOUT_S,
    TWO_RANKS,
    has_ended,
    made,
    processes,
    prompts,
    started,
    write_model,
)

pytestmark = MARKS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    """Two nodes that prefill for a third, and decode what it loses."""
    cluster = started(model, tmp_path_factory.mktemp("cluster"), num_prefill=1, num_decode=2)
    try:
        yield cluster
    finally:
        cluster.kill_everything()


async def test_answers_are_those_of_transformers(cluster, model):
    await check_greedy_answers(cluster, model, prompts(40))
    assert sum(load.num_kv_bytes for load in cluster.loads().values()) > 0


async def test_prefix_hits_shrink_the_transfer(cluster, model):
    (prompt,) = prompts(1, seed=7)
    prompt = (prompt * 600)[:500]
    asked = [request(prompt, max_tokens=4, temperature=0, ignore_eos=True)]
    async with cluster.connect() as stub:
        saved = [
            (await ask_all(stub, asked))[0].complete.kv_bytes_saved for _ in range(4)
        ]  # each decode node has it by then
    assert max(saved) > 0


async def test_a_storm_of_cancels_leaves_nothing(cluster):
    asked = [request(each, max_tokens=200, temperature=0, ignore_eos=True) for each in prompts(30, seed=3)]
    rng = random.Random(3)
    async with cluster.connect() as stub:

        async def leave(each):
            call = stub.Generate(each)
            await asyncio.sleep(rng.random() * 3)
            call.cancel()

        await asyncio.gather(*map(leave, asked))
    cluster.wait_all_free()


async def test_the_ranks_of_two_nodes_send_each_other_their_heads(model, tmp_path):
    cluster = made(model, tmp_path / "cluster")
    cluster.folder.mkdir()
    try:
        cluster.start_coordinator()
        for name in cluster.names:
            cluster.start_node(name, **TWO_RANKS)
        await asyncio.to_thread(cluster.wait_complete)
        await check_greedy_answers(cluster, model, prompts(30))
        loads = cluster.loads().values()
        assert sum(load.num_kv_bytes for load in loads) > 0
        assert all(load.num_transfers_failed == 0 for load in loads)
    finally:
        cluster.kill_everything()


async def struck(cluster, model, name, strike):
    """Strikes the node while it decodes; the answers are transformers', as another node goes on."""
    asked = [request(each, max_tokens=150, temperature=0, ignore_eos=True) for each in prompts(8, seed=11)]
    async with cluster.connect() as stub:
        answers = asyncio.create_task(ask_all(stub, asked))
        await asyncio.to_thread(wait_until, lambda: cluster.loads()[name].num_running > 0, f"{name} runs", 120.0)
        strike()
        answers = await answers
    reference = Reference(model)
    for each, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == reference.greedy(list(each.tokenized.input_ids), 150, eos_token_id=-1)


@pytest.mark.parametrize("part", ["node", "scheduler", "worker"])
async def test_a_killed_process_loses_no_answer(cluster, model, part):
    child = cluster.expect_end("decode-1")
    node, scheduler, worker = processes(child)
    victim = {"node": node, "scheduler": scheduler, "worker": worker}[part]
    await struck(cluster, model, "decode-1", lambda: victim.kill())
    wait_until(lambda: has_ended(scheduler, worker), "all have ended", 120.0)
    child.wait(60.0)
    cluster.heal()


async def test_a_worker_that_hangs_is_given_up(cluster, model):
    child = cluster.expect_end("decode-1")
    _, scheduler, worker = processes(child)
    await struck(cluster, model, "decode-1", lambda: worker.send_signal(signal.SIGSTOP))
    child.wait(4 * STEP_TIMEOUT_S)
    wait_until(lambda: has_ended(scheduler, worker), "all have ended", 120.0)
    cluster.heal()


async def test_a_drained_node_finishes_and_stops(cluster):
    asked = [request(each, max_tokens=40, temperature=0, ignore_eos=True) for each in prompts(6, seed=5)]
    async with cluster.connect() as stub:
        answers = asyncio.create_task(ask_all(stub, asked))
        await asyncio.sleep(0.5)
        assert await asyncio.to_thread(cluster.expect_end("decode-1").stop) == 0
        assert all(len(answer.token_ids) == 40 for answer in await answers)
    cluster.wait_all_free()


def test_up_starts_the_nodes_in_vllms_environment(model, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "splitserve", "up", str(model), "--engine=vllm", f"--vllm-python={PYTHON}"]
    command += [f"--grpc-port={port}", "--http-port=-1", f"--log-dir={tmp_path}", f"--start-timeout-s={DEADLINE_S}"]
    up = subprocess.Popen([*command, "--", *FLAGS, *POOL], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        said = []
        while not said or not said[-1].startswith("Ready"):
            line = up.stderr.readline()
            assert line, "".join(said)
            said.append(line)
        assert f"Model: LlamaForCausalLM by vLLM of {PYTHON}" in "".join(said)
        nodes = [child for each in psutil.Process(up.pid).children() for child in (each, *each.children(True))]
        (prompt,) = prompts(1, seed=9)
        with Client(f"127.0.0.1:{port}") as client:
            assert sorted(node.role for node in client.server_info().nodes) == ["decode", "prefill"]
            chunks = list(client.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == Reference(model).greedy(prompt, 20, eos_token_id=-1)
        up.send_signal(signal.SIGINT)
        up.stderr.read()
        assert up.wait(DEADLINE_S) == 130
        wait_until(lambda: has_ended(*nodes), "all have ended", 120.0)
    finally:
        up.kill()
        up.wait()
        up.stderr.close()
