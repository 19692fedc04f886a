"""Nodes of several ranks: answers are those of one rank, for any pair of sizes and over either transport; and the loss
of one rank is the loss of its node, at once and without a wrong token."""

import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from tests.system.answers import ask, request, stream
from tests.system.cluster import free_port, wait_until
from tests.system.greedy import check_greedy_answers
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model, write_tiny_model

pytestmark = pytest.mark.nightly

GREEDY = {"temperature": 0, "ignore_eos": True}
RANK_LOST = 3  # exit code
DEADLINE_S = 180.0

# Heads divide evenly, unevenly, and not at all: then they are replicated.
PAIRS = [
    pytest.param("zmq", 2, 1, 3, 0, id="zmq 2x1, 3 heads"),
    pytest.param("zmq", 1, 2, 3, 0, id="zmq 1x2, 3 heads"),
    pytest.param("zmq", 4, 2, 1, 0, id="zmq 4x2, 1 head"),
    pytest.param("torch_dist", 1, 1, 2, 0, id="torch_dist 1x1, 2 heads"),
    pytest.param("torch_dist", 2, 4, 3, 0, id="torch_dist 2x4, 3 heads"),
    pytest.param("zmq", 2, 2, 3, 5, id="zmq 2x2, 3 heads, divided by tokens"),
]


@pytest.mark.parametrize(("transport", "prefill_tp", "decode_tp", "num_kv_heads", "min_tokens"), PAIRS)
async def test_answers_equal_transformers(
    transport, prefill_tp, decode_tp, num_kv_heads, min_tokens, start_cluster, tmp_path
):
    model = write_tiny_model(
        tmp_path / "model",
        num_key_value_heads=num_kv_heads,
        num_attention_heads=6,
        head_dim=8,
        intermediate_size=70,
        tie_word_embeddings=prefill_tp == 2,
    )
    cluster = start_cluster(
        model,
        ipc=transport == "zmq",
        node={"kv_transport": transport, "num_kv_blocks": 200, "sequence_parallel_min_tokens": min_tokens},
        prefill={"tensor_parallel_size": prefill_tp, "max_num_batched_tokens": 64},
        decode={"tensor_parallel_size": decode_tp, "max_num_seqs": 3},
    )
    rng = random.Random(prefill_tp * 10 + decode_tp)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 8, 65, 100, 300)]
    await check_greedy_answers(cluster, model, prompts)
    _check_memory(cluster, {"prefill-0": prefill_tp, "decode-0": decode_tp}, num_kv_heads)
    cluster.stop()


def _check_memory(cluster, tp_sizes, num_kv_heads):
    """Each rank's pool holds its own heads alone: 3 layers, K and V, 200 blocks of 8 tokens, heads of 8 floats."""
    for name, tp_size in tp_sizes.items():
        wait_until(
            lambda name=name, tp_size=tp_size: len(cluster.loads()[name].ranks) == tp_size, "all ranks", DEADLINE_S
        )
        ranks = cluster.loads()[name].ranks
        assert [rank.rank for rank in ranks] == list(range(tp_size))
        heads = [rank.kv_pool_bytes // (3 * 2 * 200 * 8 * 8 * 4) for rank in ranks]
        assert sum(heads) == max(num_kv_heads, tp_size)
        assert max(heads) == -(-num_kv_heads // tp_size)
        assert all(rank.rss_bytes > 50 * 2**20 and rank.weight_bytes for rank in ranks)


@pytest.fixture(scope="module")
def _cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model"), num_kv_heads=3, step_s=0.01, token_s=0.0002)
    return start_cluster(
        model,
        num_prefill=2,
        num_decode=2,
        node={"num_kv_blocks": 500, "tensor_parallel_size": 2},
        prefill={"max_num_batched_tokens": 64},
    )


@pytest.fixture
def cluster(_cluster):
    """The module's cluster of two ranks for each node, complete before each test, with all blocks free after it."""
    _cluster.heal()
    yield _cluster
    _cluster.heal()
    _cluster.wait_all_free()


def _follower(cluster, name):
    """The second rank of a node."""
    [follower] = psutil.Process(cluster.children[name].process.pid).children(recursive=True)
    return follower


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_the_loss_of_a_rank_is_the_loss_of_its_node(name, number, cluster):
    """Its requests go on elsewhere, with the right tokens; nothing of the node is left behind."""
    prompts = [[seed] * 150 for seed in range(1, 9)]
    node, follower = cluster.expect_end(name), _follower(cluster, name)
    async with cluster.connect() as stub:
        streams = [stream(stub, request(prompt, max_tokens=60, **GREEDY)) for prompt in prompts]
        await streams[0].tokens(1)
        follower.send_signal(number)
        answers = [await answering.complete() for answering in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == fake_answer(prompt, 60)
    assert node.wait(DEADLINE_S) == RANK_LOST
    wait_until(lambda: not follower.is_running(), "the follower ends with its node", DEADLINE_S)


async def test_a_killed_leader_leaves_no_follower_behind(cluster):
    follower = _follower(cluster, "decode-1")
    cluster.kill("decode-1")
    wait_until(lambda: not follower.is_running(), "the follower ends with its node", DEADLINE_S)
    async with cluster.connect() as stub:
        answer = await ask(stub, [5, 6, 7], max_tokens=12, **GREEDY)
    assert answer.token_ids == fake_answer([5, 6, 7], 12)


async def test_cancelled_streams_free_every_rank(cluster):
    async with cluster.connect() as stub:
        for after in range(4):
            streams = [stream(stub, request([9] * 200, max_tokens=50, **GREEDY)) for _ in range(6)]
            for answering in streams[:3]:
                await answering.tokens(after)
            for answering in streams:
                answering.cancel()
    cluster.wait_all_free()
    async with cluster.connect() as stub:
        answer = await ask(stub, [9] * 200, max_tokens=12, **GREEDY)
    assert answer.token_ids == fake_answer([9] * 200, 12)


def test_more_ranks_than_attention_heads_are_refused(tmp_path):
    model = write_tiny_model(tmp_path / "model", num_attention_heads=2, num_key_value_heads=1)
    command = [sys.executable, "-m", "decode_node", str(model), "--tensor-parallel-size", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=_environment())
    assert ended.returncode == 2, ended.stderr
    assert "attention heads" in ended.stderr
    assert "3" in ended.stderr
    assert "Traceback" not in ended.stderr


@contextmanager
def two_ranks(cluster, model, folder, *flags):
    """Started from outside with the variables that torchrun sets."""
    port, ranks = free_port(), []
    try:
        for rank in range(2):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-m", "prefill_node", str(model), *flags]
            command += ["--coordinator", f"127.0.0.1:{cluster.fleet_port}", "--name", "together"]
            environment = _environment() | cluster.env | {key: str(value) for key, value in world.items()}
            with (folder / f"rank-{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_ranks_started_together_as_torchrun_does(flag, start_cluster, tmp_path):
    """Neither starts another."""
    model = write_fake_model(tmp_path / "model", num_kv_heads=2)
    cluster = start_cluster(model, num_decode=1)
    with two_ranks(cluster, model, tmp_path, flag, "2", "--block-size", "8") as ranks:
        wait_until(lambda: "together" in cluster.attached(), "the node is attached", DEADLINE_S)
        assert len(psutil.Process(ranks[0].pid).children()) == 0
        ranks[0].send_signal(signal.SIGTERM)
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]


def test_the_other_rank_of_a_node_that_is_refused_ends_as_if_it_was_told_to(start_cluster, tmp_path):
    model = write_fake_model(tmp_path / "model", num_kv_heads=2)
    cluster = start_cluster(model, num_decode=1)
    with two_ranks(cluster, model, tmp_path, "--tensor-parallel-size", "2", "--block-size", "16") as ranks:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [2, 0]
    assert "the coordinator refuses this node: " in (tmp_path / "rank-0.log").read_text()
    assert "lost a rank" not in (tmp_path / "rank-1.log").read_text()


def _environment():
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SPLITSERVE_")}
    return inherited | {"OMP_NUM_THREADS": "1"}
