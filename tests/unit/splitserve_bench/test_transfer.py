"""`splitserve bench transfer`: its arithmetic by hand, its ends for real, and the command with a tiny model."""

import io
import json
from random import Random

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.payload import HOST
from serving_core.layout import KVLayout
from splitserve.cli import main
from splitserve_bench.errors import BenchError
from splitserve_bench.transfer import measure
from splitserve_bench.transfer.command import TRANSPORTS, transfer_view
from splitserve_bench.transfer.measure import (
    COPY,
    TCP,
    Sample,
    Spread,
    TransferReport,
    copy_s,
    figures_of,
    open_sender,
    peer_process,
)
from splitserve_bench.transfer.peer import Arrival, block_ids_of, digest_of, fill
from tests.tiny_models import write_fake_model

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")
PLAIN = {COPY: 0.001, TCP: 0.04}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The other process may take long to begin."""
    monkeypatch.setattr(measure, "DEADLINE_S", 600.0)
    monkeypatch.setattr(measure, "SHARE_S", 120.0)


def sample(commit_s, cpu_s=1.0, receiver_cpu_s=1.0):
    return Sample(commit_s, cpu_s, Arrival(receiver_cpu_s, digest=0))


# ---- arithmetic ----


def test_rates_and_ratios_are_those_of_the_fastest():
    figures = figures_of("zmq-shm", 32, 10_000_000, [sample(0.08), sample(0.05), sample(0.07)], PLAIN)
    assert figures.bytes_per_s == pytest.approx(200e6)
    assert (figures.tcp_ratio, figures.copy_ratio) == pytest.approx((0.8, 0.02))
    assert figures.commit == Spread(fastest_s=0.05, median_s=0.07)


def test_cpu_seconds_are_medians_of_each_side():
    samples = [sample(0.1, 0.04, 0.05), sample(0.1, 0.02, 0.04), sample(0.1, 0.04, 0.01)]
    figures = figures_of("zmq-tcp", 32, 1, samples, PLAIN)
    assert (figures.sender_cpu_s, figures.receiver_cpu_s) == pytest.approx((0.04, 0.04))


def test_the_table():
    figures = figures_of("zmq-ipc", 32, 45 * 2**20, [sample(0.05, 0.04)], PLAIN)
    lines = shown(transfer_view(TransferReport(LAYOUT, 2, (figures,))))
    assert lines[0] == "2 layers, 2 KV heads of 4 bfloat16 values, blocks of 4 tokens; 2 CPUs for both ends"
    assert lines[2].split() == "zmq-ipc 32 45.0 MiB 50.00 50.00 0.94 80% 2% 40.00 1000.00".split()  # noqa: SIM905


def shown(view):
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(view)
    return [line.rstrip() for line in console.export_text().splitlines()]


# ---- the parts ----


def test_blocks_side_by_side_and_scattered():
    assert block_ids_of(3, 10, is_scattered=False) == [0, 1, 2]
    scattered = block_ids_of(10, 40, is_scattered=True)
    assert scattered == block_ids_of(10, 40, is_scattered=True), "both ends must choose the same ones"
    assert len({*scattered}) == 10
    assert scattered != sorted(scattered)


def test_a_pool_is_filled_with_different_bytes_in_every_layer_and_emptied():
    pool = PagedKVPool(LAYOUT, 6, torch.device("cpu"))
    fill(pool, range(6), is_random=True)
    layers = [b"".join(map(bytes, pool.read(layer, range(6)))) for layer in range(2)]
    assert layers[0] == Random(0).randbytes(6 * 2 * LAYOUT.cache_shape.num_bytes)
    assert layers[0] != layers[1]
    fill(pool, [1, 2], is_random=False)
    assert not any(b"".join(map(bytes, pool.read(1, [1, 2]))))
    assert any(b"".join(map(bytes, pool.read(1, [0, 3]))))


def test_a_digest_sees_one_changed_bit_and_the_order_of_blocks():
    pool = PagedKVPool(LAYOUT, 4, torch.device("cpu"))
    fill(pool, range(4), is_random=True)
    before = digest_of(pool, HOST, range(4))
    assert digest_of(pool, HOST, range(4)) == before
    assert digest_of(pool, HOST, [1, 0, 2, 3]) != before
    pool.keys(1).view(torch.uint8).flatten()[5] ^= 1
    assert digest_of(pool, HOST, range(4)) != before


# ---- both processes ----


async def test_every_transport_moves_the_bytes_between_two_processes(forked_processes, tmp_path):
    async with peer_process(str(tmp_path)) as (peer, _), open_sender(LAYOUT, 20, TRANSPORTS, peer, "cpu") as sender:
        for is_scattered in (False, True):
            for transport in (*TRANSPORTS, *TRANSPORTS):
                taken = await sender.sample(transport, 7, is_scattered)  # raises unless the digests are equal
                assert min(taken.commit_s, taken.cpu_s, taken.arrival.cpu_s) > 0
        assert await peer.plain_s(100_000) > 0
    assert copy_s(1000) > 0


async def test_what_arrives_changed_is_noticed(forked_processes, tmp_path):
    async with peer_process(str(tmp_path)) as (peer, _), open_sender(LAYOUT, 4, ("zmq-tcp",), peer, "cpu") as sender:
        grant = peer.arrival

        async def other_digest():
            arrival = await grant()
            return Arrival(arrival.cpu_s, arrival.digest ^ 1)

        peer.arrival = other_digest
        with pytest.raises(BenchError, match="zmq-tcp committed other bytes"):
            await sender.sample("zmq-tcp", 4, is_scattered=False)


async def test_a_receiving_process_that_cannot_obey_says_so_and_goes_on(forked_processes, tmp_path):
    async with peer_process(str(tmp_path)) as (peer, _):
        large, small = (KVLayout.uniform(1, *sizes, "float32") for sizes in ((1024,) * 3, (1, 4, 4)))
        pool = {"device": "cpu", "transports": ["zmq-tcp"], "keys": []}
        with pytest.raises(BenchError, match="of memory are free"):
            await peer.ask(open=large.uniform_fields(), pool_blocks=2**20, **pool)
        await peer.ask(open=small.uniform_fields(), pool_blocks=1, **pool)
        with pytest.raises(BenchError, match="a command"):
            await peer.ask(unknown=True)
        assert await peer.plain_s(10) > 0


def test_the_command(forked_processes, tmp_path):
    model = write_fake_model(tmp_path)
    words = "--transport zmq-ipc --transport zmq-tcp --prompt-tokens 16 --prompt-tokens 5 --block-size 4 --repeats 1"
    result = CliRunner().invoke(main, ["bench", "transfer", str(model), "--json", *words.split()])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["layout"]["block_size"] == 4
    assert report["layout"].keys() == LAYOUT.uniform_fields().keys()
    # 2 layers x K and V x 2 heads x 4 float32: 128 bytes a token; 5 tokens take two blocks of 4.
    assert [(each["transport"], each["num_bytes"]) for each in report["transfers"]] == [
        ("zmq-ipc", 16 * 128),
        ("zmq-tcp", 16 * 128),
        ("zmq-ipc", 8 * 128),
        ("zmq-tcp", 8 * 128),
    ]
    assert "prompts of 16 tokens" in result.stderr


@pytest.mark.parametrize(
    ("transport", "device", "sentence"),
    [
        ("torch_dist-nccl", "cpu", "torch_dist-nccl moves blocks between two CUDA devices"),
        ("torch_dist-ipc", "cpu", "torch_dist-ipc moves blocks on one CUDA device"),
        pytest.param(
            "zmq-tcp",
            "cuda",
            "--device cuda: there is no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_a_device_that_it_does_not_move_blocks_of(tmp_path, transport, device, sentence):
    folder = write_fake_model(tmp_path / "model")
    arguments = ["bench", "transfer", str(folder), "--transport", transport, "--device", device, "--repeats", "1"]
    refused = CliRunner().invoke(main, arguments)
    assert (refused.exit_code, sentence in refused.output) == (2, True), refused.output
