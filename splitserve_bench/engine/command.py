"""Define the command `splitserve bench engine`."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Final

import click

from serving_core.flags import SizeRange
from serving_core.process.extras import needs
from serving_core.settings import DTYPES, KV_CACHE_DTYPES, MODEL_IMPLS, QUANTIZATIONS, EngineSettings
from splitserve.commands.terminal import report
from splitserve.launch.models import resolve
from splitserve.launch.preflight import process_age_s
from splitserve_bench.engine.peers import our_result, ratios, read_peers, result_json
from splitserve_bench.engine.sizes import STEP_TOKENS, EngineBench, PromptSize
from splitserve_bench.models import SHAPES, model_folder
from splitserve_bench.options import ListOf, json_option, option
from splitserve_bench.report import print_figures

PROMPT_SIZE: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,8})", re.ASCII)
COUNT: Final = re.compile(r"[1-9]\d{0,8}", re.ASCII)
SPEED, ACCURACY, SPECULATION = "speed", "accuracy", "speculation"
ITSELF: Final = "MODEL"  # as its own draft model


def parse_count(text: str) -> int:
    """Return the whole number of at least 1 that a text means. Raises ValueError for any other text."""
    if COUNT.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_prompts(text: str) -> PromptSize:
    """Return what COUNTxLENGTH means, such as 8x512 for 8 prompts of 512 tokens.

    Raises ValueError for any other text, for zeros, and for numbers with too many digits.
    """
    match = PROMPT_SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form COUNTxLENGTH, such as 8x512")
    return PromptSize(int(match[1]), int(match[2]))


COUNTS: Final = ListOf("N,N,...", parse_count)
PROMPTS: Final = ListOf("COUNTxLENGTH,...", parse_prompts)


@click.command("engine")
@click.argument("model", default="")
@option(
    "--measure",
    default=SPEED,
    type=click.Choice((SPEED, ACCURACY, SPECULATION)),
    help="Rates and times; or, of a MODEL, the accuracy of quantized weights and KV, or speculation.",
)
@option("--shape", type=click.Choice(tuple(SHAPES)), help="Random weights of this model's sizes, not a MODEL.")
@click.option("--layers", default=0, type=click.IntRange(0), help="Only so many layers of the --shape.")
@click.option("--threads", default=0, type=click.IntRange(0), help="Threads; by default what torch takes.")
@option("--model-impl", default="auto", type=click.Choice(MODEL_IMPLS), help="As of nodes.")
@option("--dtype", default="auto", type=click.Choice(DTYPES), help="Compute dtype.")
@option("--quantization", default="none", type=click.Choice(QUANTIZATIONS))
@option("--kv-cache-dtype", default="auto", type=click.Choice(KV_CACHE_DTYPES))
@option("--block-size", default=EngineSettings().block_size, type=click.IntRange(1, 1024))
@option("--enforce-eager", is_flag=True, help="As of nodes: no CUDA graphs.")
@option("--batch-invariant", is_flag=True, help="As of nodes.")
@click.option("--weights-memory-bytes", default="0", type=SizeRange(0), help="As of nodes: the rest is elsewhere.")
@option("--weights-disk-path", default="", help="Folder on that disk; empty takes the one for temporary files.")
@option("--prompts", default="1x512,8x512,16x128", type=PROMPTS, help="Prompts to prefill.")
@option(
    "--max-num-batched-tokens",
    "step_tokens",
    default=STEP_TOKENS,
    type=click.IntRange(1),
    help="Tokens of prompts in a step.",
)
@option("--batches", default="1,4,8,16,32", type=COUNTS, help="Requests in a decode step.")
@option("--contexts", default="128,512", type=COUNTS, help="Tokens before a decode step.")
@option("--repeats", default=5, type=click.IntRange(1), help="How often each is measured.")
@option("--num-speculative-tokens", default=8, type=click.IntRange(1, 32), help="As of nodes.")
@option("--speculative-model", default="", help="A draft model, instead of lookup; MODEL: the model itself.")
@option("--speculative-quantization", default="none", type=click.Choice(QUANTIZATIONS))
@option(
    "--peer-json",
    "peer_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Another engine's result, the output of the script that measured it, or what this command printed with --json "
    "and other flags; give it again for more.",
)
@json_option
@needs("node")
def engine_command(
    model: str,
    measure: str,
    shape: str | None,
    layers: int,
    threads: int,
    prompts: tuple[PromptSize, ...],
    step_tokens: int,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    repeats: int,
    num_speculative_tokens: int,
    speculative_model: str,
    speculative_quantization: str,
    peer_files: tuple[Path, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure the engine alone, in this process: prefill and decode, and their shares of this machine's rates; the
    accuracy of quantization; or speculation."""
    if model and shape:
        raise click.UsageError("give a MODEL or --shape, not both")
    if layers and not shape:
        raise click.UsageError("--layers goes with --shape")
    if shape and measure != SPEED:
        raise click.UsageError(f"--measure {measure} needs a MODEL: a --shape has random weights")
    if peer_files and measure != SPEED:
        raise click.UsageError(f"--peer-json goes with --measure {SPEED}")
    if speculative_model and measure != SPECULATION:
        raise click.UsageError(f"--speculative-model goes with --measure {SPECULATION}")
    if speculative_quantization != "none" and not speculative_model:
        raise click.UsageError("--speculative-quantization goes with --speculative-model")
    peers = [result for file in peer_files for result in read_peers(file)]
    engine_settings = EngineSettings(**settings)
    sizes = EngineBench(prompts, tuple(sorted(batches)), tuple(sorted(contexts)), repeats, step_tokens)
    with model_folder(model, shape, layers, report) as folder:
        if measure == ACCURACY:
            from splitserve_bench.engine.accuracy import accuracy_view, measure_accuracy

            accuracy = measure_accuracy(folder, engine_settings, sizes.contexts, threads, report)
            print_figures(accuracy, accuracy_view, as_json=as_json)
            return
        if measure == SPECULATION:
            from splitserve_bench.engine.speculation import measure_speculation, speculation_view

            draft = _draft(folder, speculative_model, speculative_quantization)
            counts = num_speculative_tokens, sizes.batches, repeats
            speculation = measure_speculation(folder, engine_settings, draft, *counts, threads, report)
            print_figures(speculation, speculation_view, as_json=as_json)
            return
        from splitserve_bench.engine.measure import measure_engine  # imports torch, unlike help

        figures = measure_engine(folder, engine_settings, sizes, threads, process_age_s(), report)
    from splitserve_bench.engine.report import engine_view

    ours = our_result(figures)
    compared = ratios(ours, peers)
    listed = [dataclasses.asdict(ratio) for ratio in compared]
    view = lambda figures: engine_view(figures, compared)  # noqa: E731
    print_figures(figures, view, as_json=as_json, result=result_json(ours), ratios=listed)


def _draft(folder: Path, model: str, quantization: str) -> EngineSettings | None:
    """Return the settings to load the draft model with, or None when no draft model is named."""
    if not model:
        return None
    draft = folder if model == ITSELF else resolve(model, report).folder
    return EngineSettings(model=str(draft), quantization=quantization)
