"""Define the command `splitserve bench transfer`."""

from typing import TYPE_CHECKING, Final

import click
from rich.console import Group, RenderableType

from serving_core.model_files.config import read_model_config
from serving_core.process.extras import needs
from serving_core.settings import DEVICES, KV_CACHE_DTYPES, EngineSettings
from serving_core.units import size_of
from splitserve.commands.terminal import report
from splitserve.launch.models import resolve
from splitserve.signals import run_to_end
from splitserve_bench.options import json_option, option
from splitserve_bench.report import print_figures, table_of

if TYPE_CHECKING:
    from splitserve_bench.transfer.measure import TransferReport

TRANSPORTS: Final = ("zmq-shm", "zmq-ipc", "zmq-tcp", "zmq-curve", "torch_dist-gloo")
ON_DEVICES: Final = ("torch_dist-nccl", "torch_dist-ipc")  # between two CUDA devices, and on one
PROMPT_TOKENS: Final = (16, 128, 512, 2048, 8192)


@click.command("transfer")
@click.argument("model", default="")
@option(
    "--transport",
    "transports",
    default=TRANSPORTS,
    multiple=True,
    type=click.Choice((*TRANSPORTS, *ON_DEVICES)),
    help="Measure this transport; give it again for more.",
)
@option(
    "--prompt-tokens",
    default=PROMPT_TOKENS,
    multiple=True,
    type=click.IntRange(1),
    help="Transfer prompts of this many tokens; give it again for more.",
)
@option("--block-size", default=EngineSettings().block_size, type=click.IntRange(1, 1024))
@option("--kv-cache-dtype", default="auto", type=click.Choice(KV_CACHE_DTYPES))
@option("--scattered", is_flag=True, help="Let the blocks of a prompt lie anywhere in the pool, not side by side.")
@option("--device", default="cpu", type=click.Choice(DEVICES[1:]), help="Put the pools on this device.")
@option("--repeats", default=9, type=click.IntRange(1), help="Measure this many transfers of each kind.")
@json_option
@needs("node")
def transfer_command(
    model: str,
    transports: tuple[str, ...],
    prompt_tokens: tuple[int, ...],
    block_size: int,
    kv_cache_dtype: str,
    scattered: bool,
    device: str,
    repeats: int,
    as_json: bool,
) -> None:
    """Transfer the KV of prompts of MODEL between two processes, over each transport, beside a plain socket and a copy
    in memory."""
    from splitserve_bench.transfer.measure import TransferBench, measure_transfer  # imports torch, unlike help

    config = read_model_config(resolve(model, report).folder)
    layout = config.kv_layout(block_size, config.dtype if kv_cache_dtype == "auto" else kv_cache_dtype)
    lengths = tuple(dict.fromkeys(prompt_tokens))
    sizes = TransferBench(tuple(dict.fromkeys(transports)), lengths, repeats, scattered, device)

    async def measure() -> None:
        measured = await measure_transfer(layout, sizes, report)
        print_figures(measured, transfer_view, as_json=as_json, layout=layout.uniform_fields())

    run_to_end(measure())


def transfer_view(measured: "TransferReport") -> RenderableType:
    """Return a table with a row for each transport and prompt length."""
    layout = measured.layout
    line = (
        f"{layout.num_layers} layers, {layout.heads_text}, blocks of {layout.block_size} tokens; "
        f"{measured.num_cpus} CPUs for both ends"
    )
    table = table_of(
        measured.transfers,
        {
            "transport": lambda row: row.transport,
            "prompt tokens": lambda row: str(row.prompt_tokens),
            "KV": lambda row: size_of(row.num_bytes),
            "ms": lambda row: f"{row.commit.fastest_s * 1e3:.2f}",
            "median": lambda row: f"{row.commit.median_s * 1e3:.2f}",
            "GB/s": lambda row: f"{row.bytes_per_s / 1e9:.2f}",
            "of TCP socket": lambda row: f"{row.tcp_ratio:.0%}",
            "of memory copy": lambda row: f"{row.copy_ratio:.0%}",
            "sender CPU ms": lambda row: f"{row.sender_cpu_s * 1e3:.2f}",
            "receiver CPU ms": lambda row: f"{row.receiver_cpu_s * 1e3:.2f}",
        },
    )
    return Group(line, table, "ms: from finish to commit, the fastest, of which rates and ratios are")
