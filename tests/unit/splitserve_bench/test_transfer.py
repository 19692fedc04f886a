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
from splitserve_bench.corridor import transfer_ends
from splitserve_bench.corridor.transfer import TransferReport, YardstickFigures, figures_of
from splitserve_bench.corridor.transfer_ends import Sample, open_ends, peer_process
from splitserve_bench.corridor.transfer_peer import TRANSPORTS, Arrival, block_ids_of, digest_of, fill
from splitserve_bench.corridor.yardsticks import CHECKED, COPY, TCP, UNIX, XXH3, YARDSTICKS, Plain, Spread, spread_of
from splitserve_bench.errors import BenchError
from splitserve_bench.report import transfer_view
from tests.tiny_models import write_fake_model

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")
SECONDS = {COPY: 0.001, XXH3: 0.01, TCP: 0.04, UNIX: 0.02, CHECKED: 0.08}
PLAIN = {name: Spread(seconds, 9.0, 9.0, 9.0) for name, seconds in SECONDS.items()}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The other process may take long to begin."""
    monkeypatch.setattr(transfer_ends, "DEADLINE_S", 600.0)
    monkeypatch.setattr(transfer_ends, "SHARE_S", 120.0)


def sample(commit_s, cpu_s=1.0, checksum_s=0.0, arrival=None):
    return Sample(commit_s, cpu_s, checksum_s, arrival or Arrival(cpu_s=1.0, checksum_s=0.0, digest=0))


# ---- arithmetic ----


def test_a_spread():
    assert spread_of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(fastest_s=1.0, median_s=3.0, low_s=2.0, high_s=4.0)
    assert spread_of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("transport", "yardstick", "ratio"),
    [
        ("zmq-shm", TCP, 0.8),
        ("zmq-ipc", TCP, 0.8),
        ("zmq-tcp", TCP, 0.8),
        ("zmq-curve", TCP, 0.8),
        ("torch_dist-gloo", TCP, 0.8),
        ("loopback", COPY, 0.02),
    ],
)
def test_rates_and_ratios_are_those_of_the_fastest(transport, yardstick, ratio):
    figures = figures_of(transport, 32, 10_000_000, [sample(0.08), sample(0.05), sample(0.07)], PLAIN)
    assert figures.bytes_per_s == pytest.approx(200e6)
    assert (figures.yardstick, figures.yardstick_ratio) == (yardstick, pytest.approx(ratio))
    assert (figures.unix_ratio, figures.copy_ratio) == pytest.approx((0.4, 0.02))
    assert figures.commit.median_s == 0.07


def test_the_share_of_checksums_on_each_side():
    samples = [
        sample(0.1, cpu_s=0.04, checksum_s=0.01, arrival=Arrival(cpu_s=0.05, checksum_s=0.02, digest=0)),
        sample(0.1, cpu_s=0.02, checksum_s=0.01, arrival=Arrival(cpu_s=0.04, checksum_s=0.02, digest=0)),
        sample(0.1, cpu_s=0.04, checksum_s=0.03, arrival=Arrival(cpu_s=0.04, checksum_s=0.04, digest=0)),
    ]
    figures = figures_of("zmq-tcp", 32, 1, samples, PLAIN)
    assert (figures.sender_checksum_share, figures.receiver_checksum_share) == pytest.approx((0.5, 0.5))
    assert (figures.sender_cpu_s, figures.receiver_cpu_s) == pytest.approx((0.04, 0.04))


def test_at_loopback_both_ends_are_one_process():
    samples = [sample(0.1, cpu_s=0.1, checksum_s=0.02, arrival=Arrival(cpu_s=0.1, checksum_s=0.03, digest=0))]
    figures = figures_of("loopback", 32, 1, samples, PLAIN)
    assert figures.sender_checksum_share == pytest.approx(0.5)
    assert (figures.receiver_cpu_s, figures.receiver_checksum_share) == (None, None)


def test_the_tables():
    figures = figures_of("zmq-ipc", 32, 45 * 2**20, [sample(0.05, 0.04, 0.01)], PLAIN)
    yardsticks = [YardstickFigures(name, 32, 45 * 2**20, PLAIN[name], 2.5e9) for name in YARDSTICKS]
    lines = shown(transfer_view(TransferReport(LAYOUT, 2, (figures,), tuple(yardsticks))))
    assert lines[0] == "2 layers, 2 KV heads of 4 bfloat16 values, blocks of 4 tokens; 2 CPUs for both ends"
    row = "zmq-ipc 32 45.0 MiB 50.00 50.00 50.00-50.00 0.94 80% TCP socket 40% 2% 40.00 25% 1000.00 0%"
    assert lines[2].split() == row.split()
    assert lines[-1].split() == ["32", "2.50", "2.50", "2.50", "2.50", "2.50"]


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
    assert layers[0] == Random(0).randbytes(6 * 2 * LAYOUT.plane.num_bytes)
    assert layers[0] != layers[1]
    fill(pool, [1, 2], is_random=False)
    assert not any(b"".join(map(bytes, pool.read(1, [1, 2]))))
    assert any(b"".join(map(bytes, pool.read(1, [0, 3]))))


def test_a_digest_sees_one_changed_bit_and_the_order_of_blocks():
    pool = PagedKVPool(LAYOUT, 4, torch.device("cpu"))
    fill(pool, range(4), is_random=True)
    before, _ = digest_of(pool, HOST, range(4))
    assert digest_of(pool, HOST, range(4))[0] == before
    assert digest_of(pool, HOST, [1, 0, 2, 3])[0] != before
    pool.keys(1).view(torch.uint8).flatten()[5] ^= 1
    assert digest_of(pool, HOST, range(4))[0] != before


def test_plain_bytes_are_copied_and_checked():
    plain = Plain(1000)
    assert plain.source == b"\1" * 1000
    assert plain.copy_s() > 0
    assert plain.checksum_s() > 0


# ---- both processes ----


async def test_every_transport_moves_the_bytes_between_two_processes(forked_processes, tmp_path):
    async with peer_process(str(tmp_path)) as (peer, _):
        for is_scattered in (False, True):
            async with open_ends(LAYOUT, 20, TRANSPORTS, is_scattered, peer) as ends:
                for transport in (*TRANSPORTS, *TRANSPORTS):
                    taken = await ends.sample(transport, 7)  # raises unless the digests are equal
                    assert min(taken.commit_s, taken.cpu_s, taken.arrival.cpu_s) > 0
        for kind in ("tcp", "unix"):
            assert await peer.plain_s(Plain(100_000), kind) > 0
        assert await peer.plain_s(Plain(5 * 2**20 // 2), "unix", is_checked=True) > 0


async def test_what_arrives_changed_is_noticed(forked_processes, tmp_path):
    async with peer_process(str(tmp_path)) as (peer, _), open_ends(LAYOUT, 4, ("zmq-tcp",), False, peer) as ends:
        grant = peer.arrival

        async def other_digest():
            arrival = await grant()
            return Arrival(arrival.cpu_s, arrival.checksum_s, arrival.digest ^ 1)

        peer.arrival = other_digest
        with pytest.raises(BenchError, match="zmq-tcp committed other bytes"):
            await ends.sample("zmq-tcp", 4)


async def test_a_receiving_process_that_cannot_obey_says_so_and_goes_on(forked_processes, tmp_path):
    async with peer_process(str(tmp_path)) as (peer, _):
        with pytest.raises(BenchError, match="a command"):
            await peer.ask(unknown=True)
        large, small = (KVLayout.uniform(1, *sizes, "float32") for sizes in ((1024,) * 3, (1, 4, 4)))
        with pytest.raises(BenchError, match="of memory are free"):
            await peer.ask(open=large.uniform_fields(), pool_blocks=2**20, transports=[], keys=[])
        await peer.ask(open=small.uniform_fields(), pool_blocks=1, transports=["zmq-tcp"], keys=[])
        await peer.ask(close=True)


def test_the_command(forked_processes, tmp_path):
    model = write_fake_model(tmp_path)
    arguments = "--transport zmq-ipc --transport loopback --prompt-tokens 16 --prompt-tokens 5 --block-size 4"
    command = ["bench", "transfer", str(model), *arguments.split(), "--block-size", "8", "--repeats", "1", "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    assert [each["layout"]["block_size"] for each in reports] == [4, 8]
    assert all(each["layout"].keys() == LAYOUT.uniform_fields().keys() for each in reports)
    # 2 layers x K and V x 2 heads x 4 float32: 128 bytes a token; 5 tokens take two blocks of 4, or one of 8.
    assert [(each["transport"], each["num_bytes"]) for each in reports[0]["transfers"]] == [
        ("zmq-ipc", 16 * 128),
        ("loopback", 16 * 128),
        ("zmq-ipc", 8 * 128),
        ("loopback", 8 * 128),
    ]
    assert {each["name"] for each in reports[1]["yardsticks"]} == {*YARDSTICKS}
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
