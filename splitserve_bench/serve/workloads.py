"""The load that the flags of `splitserve bench serve` ask for."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from tokenizers import Tokenizer

from serving_core.errors import SettingsError
from serving_core.tokenizer_files import read_tokenizer_files
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import ramp_times_s, send_times_s
from splitserve_bench.serve.datasets import FittedLoad, Shape, fit, ordinary_ids, plan, random_load
from splitserve_bench.serve.misses import frequent_errors, is_complete
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.serve_options import (
    AZURE,
    CAPACITY_REQUESTS,
    NUM_PROMPTS,
    RANDOM,
    TEXTS,
    ServeOptions,
)
from splitserve_bench.serve.stages import Stage, stage_times_s, stages_of
from splitserve_bench.serve.target import ServedModel
from splitserve_bench.serve.texts import Texts
from splitserve_bench.serve.traces import at_rate, read_azure_trace, read_mooncake_trace, trace_load

CAPACITY_SEED: Final = 1_000_003  # beside --seed, so that no prompt of the load has been sent before
UNKNOWN_VOCAB_SIZE: Final = 32_000  # few models have a smaller vocabulary


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that the model can take, and how many had to be clipped for that; and the stages that they are sent
    in."""

    planned: tuple[PlannedRequest, ...]
    num_clipped: int
    stages: tuple[Stage, ...] = ()


def workload_of(options: ServeOptions, max_model_len: int | None, vocab_size: int) -> Workload:
    """Return the load of the data set, in stages of a finite --request-rate where there are some. Raises SettingsError
    or BenchError for what cannot be sent."""
    if options.stages is not None:
        return _staged(options, stages_of(options.stages, options.request_rate), max_model_len, vocab_size)
    if options.dataset_name == RANDOM:
        shapes, send_at_s = _random(options, vocab_size)
    elif options.dataset_name in TEXTS:
        shapes, send_at_s = _texts(options)
    else:
        shapes, send_at_s = _trace(options, vocab_size)
    fitted = FittedLoad(tuple(shapes), 0) if max_model_len is None else fit(shapes, max_model_len)
    return Workload(tuple(plan(fitted.shapes, send_at_s, ignore_eos=options.ignore_eos)), fitted.num_clipped)


def capacity_load(options: ServeOptions, max_model_len: int | None, vocab_size: int) -> Workload:
    """Return the requests that the capacity is measured with, all due at once: those of the data set, but of another
    seed. Raises SettingsError or BenchError for what cannot be sent."""
    options = replace(options, seed=options.seed + CAPACITY_SEED)
    return _of_any_length(options, [0.0] * CAPACITY_REQUESTS, max_model_len, vocab_size)


def capacity_per_s(outcomes: Sequence[Outcome]) -> float:
    """Return how many of the requests of a closed loop ended a second. Raises BenchError when some failed."""
    if errors := frequent_errors(outcomes):
        num_failed = sum(not is_complete(outcome) for outcome in outcomes)
        raise BenchError(
            f"the capacity cannot be measured: {num_failed} of {len(outcomes)} requests failed ({errors[0][0]}); give "
            "--request-rate"
        )
    return len(outcomes) / (max(each.ended_s for each in outcomes) - min(each.sent_s for each in outcomes))


def warm_up_of(workload: Workload, count: int, vocab_size: int, seed: int) -> list[PlannedRequest]:
    """So many requests of the lengths of the first ones, all at once, whose prompts are none of theirs."""
    ids = ordinary_ids(vocab_size)
    requests = []
    for index in range(count if workload.planned else 0):
        like = workload.planned[index % len(workload.planned)]
        prompt = tuple(Random(f"{seed} warm-up {index}").choices(ids, k=len(like.prompt)))
        requests.append(replace(like, index=index, send_at_s=0.0, prompt=prompt, text=""))
    return requests


def as_texts(planned: Sequence[PlannedRequest], folder: Path) -> list[PlannedRequest]:
    """Return the same requests with prompts as text: what the tokenizer of the folder makes of the tokens of those that
    have none. Raises ModelError."""
    tokenizer = read_tokenizer_files(folder).tokenizer
    return [each if each.text else replace(each, text=tokenizer.decode(each.prompt)) for each in planned]


def vocab_size_of(options: ServeOptions, served: ServedModel, report: Callable[[str], None]) -> int:
    """As told by a flag, a folder, the server; else a guess, which is reported."""
    if options.vocab_size is not None:
        return options.vocab_size
    if options.tokenizer is not None:
        return _vocab_size_in(options.tokenizer)
    if served.vocab_size is not None:
        return served.vocab_size
    report(
        f"the server does not tell its vocabulary: prompts are of token ids below {UNKNOWN_VOCAB_SIZE} (--tokenizer)"
    )
    return UNKNOWN_VOCAB_SIZE


def _staged(options: ServeOptions, stages: tuple[Stage, ...], max_model_len: int | None, vocab_size: int) -> Workload:
    times_s = stage_times_s(stages, options.burstiness, options.seed)
    return replace(_of_any_length(options, times_s, max_model_len, vocab_size), stages=stages)


def _of_any_length(
    options: ServeOptions, times_s: Sequence[float], max_model_len: int | None, vocab_size: int
) -> Workload:
    """Requests at these times. A trace gives lengths; where the data set ends before the times do it begins anew, with
    other tokens unless it says itself which prompts share theirs."""
    planned: list[PlannedRequest] = []
    num_clipped, lap = 0, 0
    while missing := len(times_s) - len(planned):
        part = replace(options, stages=None, request_rate=math.inf, num_prompts=missing, seed=options.seed + lap)
        workload = workload_of(part, max_model_len, vocab_size)
        planned += workload.planned
        num_clipped, lap = num_clipped + workload.num_clipped, lap + 1
    timed = [replace(each, index=i, send_at_s=times_s[i]) for i, each in enumerate(planned)]
    return Workload(tuple(timed), num_clipped)


def _random(options: ServeOptions, vocab_size: int) -> tuple[Sequence[Shape], list[float]]:
    count = options.num_prompts or NUM_PROMPTS
    lengths = (options.random_input_len, options.random_output_len)
    rng, prefix_tokens = Random(options.seed), options.random_prefix_len
    ratio = options.random_range_ratio
    shapes = random_load(count, *lengths, ratio, vocab_size, rng, prefix_tokens=prefix_tokens)
    return shapes, _times_s(count, options)


def _texts(options: ServeOptions) -> tuple[Sequence[Shape], list[float]]:
    assert options.dataset_path is not None, "the flags were not checked"
    assert options.tokenizer is not None, "the flags were not checked"
    texts = Texts(
        options.dataset_name,
        options.dataset_path,
        options.tokenizer,
        options.text_output_len,
        skips_chat_template=options.skip_chat_template or options.takes_chats,  # the server renders a chat
    )
    shapes = texts.shapes(options.num_prompts or NUM_PROMPTS, Random(options.seed))
    return shapes, _times_s(len(shapes), options)


def _times_s(count: int, options: ServeOptions) -> list[float]:
    rng = Random(f"{options.seed} arrivals")
    if options.ramp is not None:
        return ramp_times_s(count, options.ramp, options.burstiness, rng)
    return send_times_s(count, options.request_rate, options.burstiness, rng)


def _trace(options: ServeOptions, vocab_size: int) -> tuple[Sequence[Shape], list[float]]:
    assert options.dataset_path is not None, "the flags were not checked"
    read = read_azure_trace if options.dataset_name == AZURE else read_mooncake_trace
    traced = read(
        options.dataset_path,
        length_scale=options.length_scale,
        time_scale=options.time_scale,
        limit=options.num_prompts,
    )
    if math.isfinite(options.request_rate):
        traced = at_rate(traced, options.request_rate)
    return trace_load(traced, vocab_size, options.seed), [each.at_s for each in traced]


def _vocab_size_in(folder: Path) -> int:
    """Of tokenizer.json, or of config.json where there is none."""
    try:
        if (folder / "tokenizer.json").exists():
            return int(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size())
        return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except Exception as error:  # tokenizers raises nothing narrower
        raise SettingsError(f"{folder} has no vocabulary: {error}") from error
