"""Make the requests of a load: random ones, and those of traces, which say when requests came and how long they were.

Traces have no text. Their prompts are random tokens; where a trace says which prompts begin alike, theirs do too.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO, TypeVar

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.records import PlannedRequest

SPECIAL_MARGIN_TOKENS: Final = 1024
MAX_IDS: Final = 2**22
AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS: Final = 512
MAX_TOKENS: Final = 2**24

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Shape:
    """A prompt, as token ids, and the length of its output; both have at least one token.

    With `text` it is sent as text.
    """

    prompt: tuple[int, ...]
    output_tokens: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class FittedLoad:
    """Requests that are no longer than the model takes, and how many had to be clipped for that."""

    shapes: tuple[Shape, ...]
    num_clipped: int


def random_load(
    num_requests: int,
    input_tokens: int,
    output_tokens: int,
    range_ratio: float,
    vocab_size: int,
    rng: Random,
    *,
    prefix_tokens: int = 0,
) -> list[Shape]:
    """Return `num_requests` requests with random prompts of random lengths, all lengths equally likely.

    `rng` draws them, the token ids from a vocabulary of `vocab_size` tokens. Lengths are from floor(n · (1 -
    range_ratio)) to ceil(n · (1 + range_ratio)), both included and at least 1, as in vLLM's `random` data set. All
    prompts begin with the same `prefix_tokens` tokens, which are not counted among `input_tokens`. Raises BenchError
    unless range_ratio is in [0, 1) and both lengths are at least 1.
    """
    if not 0 <= range_ratio < 1:
        raise BenchError(f"the range ratio must be in [0, 1), not {range_ratio:g}")
    if input_tokens < 1 or output_tokens < 1:
        raise BenchError(f"prompts and outputs have at least 1 token, not {min(input_tokens, output_tokens)}")
    ids = ordinary_ids(vocab_size)
    prefix = tuple(rng.choices(ids, k=prefix_tokens))
    shapes = []
    for _ in range(num_requests):
        prompt_length = _length(input_tokens, range_ratio, rng)
        output_length = _length(output_tokens, range_ratio, rng)
        shapes.append(Shape((*prefix, *rng.choices(ids, k=prompt_length)), output_length))
    return shapes


@lru_cache(maxsize=1)
def ordinary_ids(vocab_size: int) -> tuple[int, ...]:
    """Return the ids to draw prompts from: a vocabulary's without special tokens.

    These are its first or its last ones, so 1024 at either end are left out; of a small vocabulary only an eighth at
    either end. All prompts have these very objects, so that a token takes 8 bytes and not 40. Raises BenchError for an
    impossible size.
    """
    if not 1 <= vocab_size <= MAX_IDS:
        raise BenchError(f"a vocabulary has 1 to {MAX_IDS} tokens, not {vocab_size}")
    margin = min(SPECIAL_MARGIN_TOKENS, vocab_size // 8)
    return tuple(range(margin, vocab_size - margin))


def fit(shapes: Iterable[Shape], max_model_len: int) -> FittedLoad:
    """Clip the requests with more than `max_model_len` tokens, prompt and output together, to exactly that many.

    The output is shortened first, but to no less than half of max_model_len, then the end of the prompt is cut off; so
    the beginnings that prompts share stay shared. A text of which something is cut off is sent as token ids. Raises
    BenchError when max_model_len is below 2.
    """
    if max_model_len < 2:
        raise BenchError(f"a model of {max_model_len} tokens has no room for a prompt and an output")
    before = tuple(shapes)
    after = tuple(_clipped(shape, max_model_len) for shape in before)
    return FittedLoad(after, sum(old is not new for old, new in zip(before, after, strict=True)))


def clipped_words(share: float, max_model_len: int | None) -> str:
    """Return a sentence about the share of requests that are clipped to `max_model_len` tokens; "" for 0."""
    return (
        f"{share:.1%} of the requests are longer than {max_model_len} tokens, and are clipped to that" if share else ""
    )


def plan(shapes: Sequence[Shape], send_at_s: Sequence[float], *, ignore_eos: bool = True) -> list[PlannedRequest]:
    """Return one planned request for each shape, sent at the time of the same index. The times must be in order.

    With `ignore_eos` an output goes on to its full length after an end-of-sequence token.
    """
    pairs = zip(shapes, send_at_s, strict=True)
    return [
        PlannedRequest(i, at_s, shape.prompt, shape.output_tokens, text=shape.text, ignore_eos=ignore_eos)
        for i, (shape, at_s) in enumerate(pairs)
    ]


def _length(mean: int, range_ratio: float, rng: Random) -> int:
    least, most = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
    return rng.randint(max(1, least), most)


def _clipped(shape: Shape, max_model_len: int) -> Shape:
    prompt_tokens = len(shape.prompt)
    if prompt_tokens + shape.output_tokens <= max_model_len:
        return shape
    output_tokens = min(shape.output_tokens, max(max_model_len - prompt_tokens, max_model_len // 2))
    kept = shape.prompt[: max_model_len - output_tokens]
    return Shape(kept, output_tokens, shape.text if len(kept) == prompt_tokens else "")


# ---- traces ----


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace, after scaling. `at_s` is after the trace's first request; lengths are at least 1.

    Requests whose hash_ids begin alike have prompts that begin alike; each id stands for block_tokens tokens of the
    prompt, the last one for the rest. Without hash_ids no two prompts have anything in common.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: float = MOONCAKE_BLOCK_TOKENS


def read_azure_trace(path: Path, *, length_scale: float = 1.0, limit: int | None = None) -> list[TracedRequest]:
    """Return the first `limit` requests (None: all) of a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens.

    These are the columns of the Azure LLM inference traces; a timestamp without an offset is UTC. Token counts are
    multiplied by length_scale. Raises BenchError, which names file, line and value.
    """
    return _read(path, _azure_rows, length_scale, limit)


def read_mooncake_trace(path: Path, *, length_scale: float = 1.0, limit: int | None = None) -> list[TracedRequest]:
    """Return the first `limit` requests (None: all) of a file with one JSON object a line, as the Mooncake traces have.

    Its fields are timestamp (ms), input_length, output_length and hash_ids, one for each 512 tokens of the prompt.
    Token counts are multiplied by length_scale. Raises BenchError, which names file, line and value.
    """
    return _read(path, _mooncake_rows, length_scale, limit)


def at_rate(traced: Sequence[TracedRequest], rate_per_s: float) -> list[TracedRequest]:
    """Return the requests with their times stretched so that the mean gap is 1 / rate; the bursts stay.

    An infinite rate sends all at 0. Raises BenchError for requests that all came at one moment, and a rate not above 0.
    """
    if not rate_per_s > 0:
        raise BenchError(f"the request rate must be above 0 requests/s, not {rate_per_s:g}")
    if len(traced) < 2 or math.isinf(rate_per_s):
        return [replace(each, at_s=0.0) for each in traced]
    first_s, span_s = traced[0].at_s, traced[-1].at_s - traced[0].at_s
    if span_s <= 0:
        raise BenchError(f"the {len(traced)} requests came at one moment: a rate cannot stretch their gaps")
    wanted_s = (len(traced) - 1) / rate_per_s
    return [replace(each, at_s=wanted_s * ((each.at_s - first_s) / span_s)) for each in traced]


def trace_load(traced: Sequence[TracedRequest], vocab_size: int, seed: int, first: int = 0) -> list[Shape]:
    """Return prompts and output lengths of a trace's requests.

    A prompt's tokens depend on the seed and its hash ids, or without these on the request's number, which counts from
    `first`; not on how many requests there are.
    """
    ids = ordinary_ids(vocab_size)
    return [
        Shape(_traced_prompt(each, index, ids, seed), each.output_tokens) for index, each in enumerate(traced, first)
    ]


def _traced_prompt(traced: TracedRequest, index: int, ids: Sequence[int], seed: int) -> tuple[int, ...]:
    if not traced.hash_ids:
        return tuple(Random(f"{seed} request {index}").choices(ids, k=traced.input_tokens))
    tokens: list[int] = []
    for number, hash_id in enumerate(traced.hash_ids, start=1):
        end = traced.input_tokens if number == len(traced.hash_ids) else round(number * traced.block_tokens)
        num_missing = min(end, traced.input_tokens) - len(tokens)
        tokens += Random(f"{seed} block {hash_id}").choices(ids, k=max(0, num_missing))
    return tuple(tokens)


def _read(
    path: Path, rows_of: Callable[[Path], Iterator[tuple[str, TracedRequest]]], length_scale: float, limit: int | None
) -> list[TracedRequest]:
    """Return the requests of a trace. `rows_of` yields the place and the unscaled request of each line."""
    if not (length_scale > 0 and math.isfinite(length_scale)):
        raise BenchError(f"the length scale must be above 0, not {length_scale:g}")
    try:
        rows = list(islice(rows_of(path), limit))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise BenchError(f"{path} has no requests")
    for (_, row), (where, later) in pairwise(rows):
        if later.at_s < row.at_s:
            raise BenchError(f"{where}: {row.at_s - later.at_s:g} s before the row above it")
    first_s = rows[0][1].at_s
    return [
        replace(
            row,
            at_s=row.at_s - first_s,
            input_tokens=max(1, round(row.input_tokens * length_scale)),
            output_tokens=max(1, round(row.output_tokens * length_scale)),
            block_tokens=row.block_tokens * length_scale,
        )
        for _, row in rows
    ]


def _azure_rows(path: Path) -> Iterator[tuple[str, TracedRequest]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise BenchError(f"{path}, line 1: no column {', '.join(missing)}")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            at_s, input_tokens, output_tokens = (
                parsed(parse, row[name], name, where)
                for name, parse in zip(AZURE_COLUMNS, (_timestamp_s, token_count, token_count), strict=True)
            )
            yield where, TracedRequest(at_s, int(input_tokens), int(output_tokens))


def _mooncake_rows(path: Path) -> Iterator[tuple[str, TracedRequest]]:
    with path.open(encoding="utf-8") as file:
        for where, row in json_rows(file, path):
            at_s = parsed(_milliseconds, row.get("timestamp"), "timestamp", where) / 1e3
            lengths = [parsed(token_count, row.get(name), name, where) for name in ("input_length", "output_length")]
            hash_ids = parsed(_hash_ids, row.get("hash_ids", []), "hash_ids", where)
            num_blocks = math.ceil(lengths[0] / MOONCAKE_BLOCK_TOKENS)
            if hash_ids and len(hash_ids) != num_blocks:
                raise BenchError(f"{where}: {len(hash_ids)} hash_ids for {lengths[0]} tokens instead of {num_blocks}")
            yield where, TracedRequest(at_s, lengths[0], lengths[1], hash_ids)


def json_rows(file: TextIO, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place (in words) and object of each line of a file with one JSON object a line; blank lines are left out.

    Raises BenchError for a line that is no object.
    """
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parsed(_json_object, line, "line", where)


def parsed(parse: Callable[[Any], Value], value: Any, name: str, where: str) -> Value:
    """Return `parse(value)`.

    Raises BenchError, which says `where` and what the value's `name` is, when parse refuses it.
    """
    try:
        return parse(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BenchError(f"{where}: {name} cannot be {str(value)[:80]!r}") from error


def _timestamp_s(text: str) -> float:
    moment = datetime.fromisoformat(text)  # leaves out what a timestamp tells beyond microseconds
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def token_count(value: Any) -> int:
    """Return a value as a number of tokens. Raises ValueError or TypeError for other values, and above MAX_TOKENS."""
    count = _whole(value)
    if count > MAX_TOKENS:
        raise ValueError
    return count


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool | float) or number < 0:
        raise ValueError
    return number


def _milliseconds(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _hash_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(_whole(each) for each in value)


def _json_object(line: str) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TypeError
    return value
