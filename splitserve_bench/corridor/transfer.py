"""How fast the corridor moves the KV of a prompt that is all computed, from `finish` to the sender's commit.

The sender is this process and the receiver another, each with a KV pool and a core of its own where there are two.
(`loopback` is both ends in this process.) Every repeat goes once through all transports and yardsticks, so that what
disturbs the machine hits all alike. The connection exists before; what arrives is compared with what was sent.
Rates, and ratios to those of the yardsticks, are those of the fastest repeats.

The share of checksums: the same checksum calls on the same blocks are repeated by themselves after each transfer, and
their CPU time is divided by what the process took for the transfer, threads included. At loopback, which is one
process, both ends count together.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from serving_core.layout import KVLayout
from serving_core.socket_folder import SocketFolder
from splitserve.launch.models import Report
from splitserve_bench.corridor.transfer_ends import Ends, PeerProcess, Sample, open_ends, peer_process
from splitserve_bench.corridor.transfer_peer import (
    CUDA_IPC,
    GLOO,
    LOOPBACK,
    NCCL,
    ZMQ_CURVE,
    ZMQ_IPC,
    ZMQ_SHM,
    ZMQ_TCP,
    check_device,
)
from splitserve_bench.corridor.yardsticks import CHECKED, COPY, TCP, UNIX, XXH3, YARDSTICKS, Plain, Spread, spread_of

BY_PROCESSES: Final = (ZMQ_SHM, ZMQ_IPC, ZMQ_TCP, ZMQ_CURVE, GLOO, NCCL, CUDA_IPC)
YARDSTICK_OF: Final = dict.fromkeys(BY_PROCESSES, TCP) | {LOOPBACK: COPY}


@dataclass(frozen=True, slots=True)
class TransferBench:
    """What is measured."""

    transports: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    repeats: int
    is_scattered: bool  # whether a prompt's blocks lie anywhere in the pool, instead of side by side
    device: str = "cpu"  # where both pools are; of several CUDA devices on two


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """One transport and one prompt, which takes num_bytes. CPU seconds and shares are medians; what the receiver does
    at loopback is part of the sender's."""

    transport: str
    prompt_tokens: int
    num_bytes: int
    commit: Spread
    bytes_per_s: float
    yardstick: str
    yardstick_ratio: float  # rate over the rate of the yardstick, for the same bytes
    unix_ratio: float  # the same over that of a plain Unix socket
    copy_ratio: float  # and over that of copying them in memory once
    sender_cpu_s: float
    receiver_cpu_s: float | None
    sender_checksum_share: float
    receiver_checksum_share: float | None


@dataclass(frozen=True, slots=True)
class YardstickFigures:
    """One yardstick for the bytes of one prompt."""

    name: str
    prompt_tokens: int
    num_bytes: int
    spread: Spread
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Everything that was measured with one layout, on so many CPUs (0: not known)."""

    layout: KVLayout
    num_cpus: int
    transfers: tuple[TransferFigures, ...]
    yardsticks: tuple[YardstickFigures, ...]


async def measure_transfer(layout: KVLayout, sizes: TransferBench, report: Report) -> TransferReport:
    """Starts the receiving process, measures, stops it. Raises BenchError, and SettingsError when the pools do not fit
    into the memory, or a transport does not move blocks of the device."""
    check_device(sizes.transports, sizes.device)
    pool_blocks = layout.num_blocks_for(max(sizes.prompt_tokens))
    transfers: list[TransferFigures] = []
    yardsticks: list[YardstickFigures] = []
    with SocketFolder() as folder:
        async with (
            peer_process(str(folder.path)) as (peer, num_cpus),
            open_ends(layout, pool_blocks, sizes.transports, sizes.is_scattered, peer, sizes.device) as ends,
        ):
            for prompt_tokens in sizes.prompt_tokens:
                report(f"blocks of {layout.block_size}, prompts of {prompt_tokens} tokens ...")
                num_blocks = layout.num_blocks_for(prompt_tokens)
                num_bytes = num_blocks * layout.block_bytes
                samples = {name: await _warm_up(ends, name, num_blocks) for name in sizes.transports}
                plain_s = await _measure(ends, peer, num_blocks, Plain(num_bytes), sizes.repeats, samples)
                plain = {name: spread_of(seconds) for name, seconds in plain_s.items()}
                yardsticks += [
                    YardstickFigures(name, prompt_tokens, num_bytes, spread, num_bytes / spread.fastest_s)
                    for name, spread in plain.items()
                ]
                transfers += [figures_of(name, prompt_tokens, num_bytes, samples[name], plain) for name in samples]
    return TransferReport(layout, num_cpus, tuple(transfers), tuple(yardsticks))


def figures_of(
    transport: str, prompt_tokens: int, num_bytes: int, samples: Sequence[Sample], plain: Mapping[str, Spread]
) -> TransferFigures:
    """The figures of the samples of one transport, one at least. The ratio of the rates of equal bytes is the inverse
    one of their times."""
    commit = spread_of([sample.commit_s for sample in samples])
    yardstick = YARDSTICK_OF[transport]
    receiver_cpu_s = receiver_share = None
    if transport == LOOPBACK:
        sender_share = statistics.median((each.checksum_s + each.arrival.checksum_s) / each.cpu_s for each in samples)
    else:
        sender_share = statistics.median(each.checksum_s / each.cpu_s for each in samples)
        receiver_share = statistics.median(each.arrival.checksum_s / each.arrival.cpu_s for each in samples)
        receiver_cpu_s = statistics.median(each.arrival.cpu_s for each in samples)
    return TransferFigures(
        transport=transport,
        prompt_tokens=prompt_tokens,
        num_bytes=num_bytes,
        commit=commit,
        bytes_per_s=num_bytes / commit.fastest_s,
        yardstick=yardstick,
        yardstick_ratio=plain[yardstick].fastest_s / commit.fastest_s,
        unix_ratio=plain[UNIX].fastest_s / commit.fastest_s,
        copy_ratio=plain[COPY].fastest_s / commit.fastest_s,
        sender_cpu_s=statistics.median(sample.cpu_s for sample in samples),
        receiver_cpu_s=receiver_cpu_s,
        sender_checksum_share=sender_share,
        receiver_checksum_share=receiver_share,
    )


async def _warm_up(ends: Ends, transport: str, num_blocks: int) -> list[Sample]:
    """One transfer that connects and does not count."""
    await ends.sample(transport, num_blocks)
    return []


async def _measure(
    ends: Ends, peer: PeerProcess, num_blocks: int, plain: Plain, repeats: int, samples: Mapping[str, list[Sample]]
) -> dict[str, list[float]]:
    """Adds to the samples of each transport; gives the seconds of each yardstick."""
    for kind in ("tcp", "unix"):  # touches the buffer at the other end
        await peer.plain_s(plain, kind)
    seconds: dict[str, list[float]] = {name: [] for name in YARDSTICKS}
    for _ in range(repeats):
        for transport, taken in samples.items():
            taken.append(await ends.sample(transport, num_blocks))
        seconds[COPY].append(plain.copy_s())
        seconds[XXH3].append(plain.checksum_s())
        seconds[TCP].append(await peer.plain_s(plain, "tcp"))
        seconds[UNIX].append(await peer.plain_s(plain, "unix"))
        seconds[CHECKED].append(await peer.plain_s(plain, "unix", is_checked=True))
    return seconds
