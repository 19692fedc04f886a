"""`splitserve bench engine`."""

import dataclasses
import json
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import click

from serving_core.extras import needs
from serving_core.flags import SizeRange
from serving_core.settings import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from splitserve.commands.terminal import report, stdout
from splitserve.launch.models import Report
from splitserve.launch.preflight import process_age_s
from splitserve_bench.engine.figures import STEP_TOKENS, EngineBench, PromptSize
from splitserve_bench.engine.peers import our_result, ratios, read_peers
from splitserve_bench.engine.random_models import SHAPES, shape_of, write_random_model
from splitserve_bench.models import writing_model
from splitserve_bench.options import ListOf

PROMPT_SIZE: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,8})", re.ASCII)
WITHOUT_FLAG: Final = "without --batch-invariant"
COUNT: Final = re.compile(r"[1-9]\d{0,8}", re.ASCII)


def parse_count(text: str) -> int:
    """A whole number of at least 1. Raises ValueError."""
    if COUNT.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_prompts(text: str) -> PromptSize:
    """COUNTxLENGTH. Raises ValueError."""
    match = PROMPT_SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form COUNTxLENGTH, such as 8x512")
    return PromptSize(int(match[1]), int(match[2]))


COUNTS: Final = ListOf("N,N,...", parse_count)
PROMPTS: Final = ListOf("COUNTxLENGTH,...", parse_prompts)


@click.command("engine")
@click.argument("model", default="")
@click.option("--shape", type=click.Choice(tuple(SHAPES)), help="Random weights of this model's sizes, not a MODEL.")
@click.option("--layers", default=0, type=click.IntRange(0), help="Only so many layers of the --shape.")
@click.option("--threads", default=0, type=click.IntRange(0), help="Threads; by default what torch takes.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES), help="Compute dtype.")
@click.option("--quantization", default="none", show_default=True, type=click.Choice(QUANTIZATIONS))
@click.option("--kv-cache-dtype", default="auto", show_default=True, type=click.Choice(KV_CACHE_DTYPES))
@click.option("--block-size", default=EngineSettings().block_size, show_default=True, type=click.IntRange(1, 1024))
@click.option("--enforce-eager", is_flag=True, help="As of nodes: no CUDA graphs.")
@click.option("--batch-invariant", is_flag=True, help="As of nodes; measured without it too, for the price.")
@click.option("--weights-memory-bytes", default="0", type=SizeRange(0), help="As of nodes: the rest is elsewhere.")
@click.option("--weights-disk-path", default="", help="Folder on that disk; empty takes the one for temporary files.")
@click.option("--with-transformers", is_flag=True, help="Measured with --model-impl transformers too, to compare.")
@click.option("--prompts", default="1x512,8x512,16x128", show_default=True, type=PROMPTS, help="Prompts to prefill.")
@click.option(
    "--max-num-batched-tokens",
    "step_tokens",
    default=STEP_TOKENS,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of prompts in a step.",
)
@click.option("--shared-steps", "shares_steps", is_flag=True, help="Prompts share steps, as in nodes.")
@click.option("--batches", default="1,4,8,16,32", show_default=True, type=COUNTS, help="Requests in a decode step.")
@click.option("--contexts", default="128,512", show_default=True, type=COUNTS, help="Tokens before a decode step.")
@click.option("--structured", is_flag=True, help="What a grammar for each answer costs a step; needs a MODEL.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="How often each is measured.")
@click.option(
    "--peer-json",
    "peer_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Another engine's result or the output of the script that measured it; give it again for more.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@needs("node")
def engine_command(
    model: str,
    shape: str | None,
    layers: int,
    threads: int,
    dtype: str,
    quantization: str,
    kv_cache_dtype: str,
    block_size: int,
    enforce_eager: bool,
    batch_invariant: bool,
    weights_memory_bytes: int,
    weights_disk_path: str,
    with_transformers: bool,
    prompts: tuple[PromptSize, ...],
    step_tokens: int,
    shares_steps: bool,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    structured: bool,
    repeats: int,
    peer_files: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Measure the engine alone, in this process: prefill, decode, and what they are of this machine's rates."""
    if model and shape:
        raise click.UsageError("give a MODEL or --shape, not both")
    if layers and not shape:
        raise click.UsageError("--layers goes with --shape")
    peers = [result for file in peer_files for result in read_peers(file)]
    if structured and shape:
        raise click.UsageError("--structured needs a MODEL: --shape has no tokenizer")
    sizes = EngineBench(
        prompts, tuple(sorted(batches)), tuple(sorted(contexts)), repeats, structured, step_tokens, shares_steps
    )
    settings = EngineSettings(
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
        weights_memory_bytes=weights_memory_bytes,
        weights_disk_path=weights_disk_path,
    )
    from splitserve_bench.engine.engine import measure_engine, measure_transformers  # import torch, unlike help

    imports_s = process_age_s()
    without, theirs = [], []
    with model_folder(model, shape, layers, report) as folder:
        if batch_invariant:
            plain = dataclasses.replace(settings, batch_invariant=False)
            report(f"first {WITHOUT_FLAG}:")
            without = [our_result(measure_engine(folder, plain, sizes, threads, imports_s, report), WITHOUT_FLAG)]
        if with_transformers:
            report("first with --model-impl transformers:")
            theirs = [measure_transformers(folder, settings, sizes, threads, report)]
        figures = measure_engine(folder, settings, sizes, threads, imports_s, report)
    compared, price, gain = (ratios(our_result(figures), others) for others in (peers, without, theirs))
    if as_json:
        rows = {"ratios": compared, "price": price, "gain": gain}
        listed = {name: [dataclasses.asdict(ratio) for ratio in each] for name, each in rows.items()}
        click.echo(json.dumps({**dataclasses.asdict(figures), **listed}))
        return
    from splitserve_bench.engine.report import engine_view

    stdout.print(engine_view(figures, compared, price, gain))


@contextmanager
def model_folder(model: str, name: str | None, layers: int, report: Report) -> Iterator[Path]:
    """That of a model, or one of a shape of SHAPES for as long as it is needed."""
    if name is None:
        yield writing_model(model, report).folder
        return
    shape = shape_of(name, layers)
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="splitserve-bench-") as scratch:
        report(f"writing random weights of the sizes of {name} ...")
        folder = Path(scratch) / (f"{name}-{layers}-layers" if layers else name)
        write_random_model(folder, shape)
        yield folder


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM an exception, so that no gigabytes stay behind."""

    def end(signal_number: int, _: object) -> NoReturn:
        raise SystemExit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
