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
    help="Measure rates and times; or, of a MODEL, the accuracy of quantized weights and KV, or speculation.",
)
@option(
    "--shape", type=click.Choice(tuple(SHAPES)), help="Take random weights of this model's sizes instead of a MODEL."
)
@click.option("--layers", default=0, type=click.IntRange(0), help="Take only this many layers of the --shape.")
@click.option(
    "--threads", default=0, type=click.IntRange(0), help="Compute with this many threads; default: what torch takes."
)
@option(
    "--model-impl", default="auto", type=click.Choice(MODEL_IMPLS), help="Compute with this model code, as nodes do."
)
@option("--dtype", default="auto", type=click.Choice(DTYPES), help="Compute in this dtype.")
@option("--quantization", default="none", type=click.Choice(QUANTIZATIONS), help="Quantize the weights, as nodes do.")
@option(
    "--kv-cache-dtype", default="auto", type=click.Choice(KV_CACHE_DTYPES), help="Store KV in this dtype, as nodes do."
)
@option(
    "--block-size",
    default=EngineSettings().block_size,
    type=click.IntRange(1, 1024),
    help="Store this many tokens in a block.",
)
@option("--enforce-eager", is_flag=True, help="Run decode steps without CUDA graphs, as nodes do.")
@option("--batch-invariant", is_flag=True, help="Make bits independent of the batch, as nodes do.")
@click.option(
    "--weights-memory-bytes",
    default="0",
    type=SizeRange(0),
    help="Keep at most this much of the weights in memory, as nodes do.",
)
@option(
    "--weights-disk-path",
    default="",
    help="Put offloaded weights into this folder; default: the one for temporary files.",
)
@option("--prompts", default="1x512,8x512,16x128", type=PROMPTS, help="Prefill these prompts, as NUMBERxTOKENS.")
@option(
    "--max-num-batched-tokens",
    "step_tokens",
    default=STEP_TOKENS,
    type=click.IntRange(1),
    help="Compute at most this many prompt tokens in a step.",
)
@option("--batches", default="1,4,8,16,32", type=COUNTS, help="Measure decode steps of this many requests.")
@option("--contexts", default="128,512", type=COUNTS, help="Measure decode steps behind this many tokens.")
@option("--repeats", default=5, type=click.IntRange(1), help="Measure each figure this many times.")
@option(
    "--num-speculative-tokens",
    default=8,
    type=click.IntRange(1, 32),
    help="Verify at most this many draft tokens in a step.",
)
@option(
    "--speculative-model",
    default="",
    help="Take draft tokens from this draft model instead of lookup; MODEL is the model itself.",
)
@option(
    "--speculative-quantization",
    default="none",
    type=click.Choice(QUANTIZATIONS),
    help="Quantize the weights, as nodes do.",
)
@option(
    "--peer-json",
    "peer_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare with this result: the output of a script that measured another engine, or what "
    "this command printed with --json and other flags; give it again for more.",
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
