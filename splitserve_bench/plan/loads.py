"""The loads of a search: the same requests for every plan, at whatever rate. A trace begins again when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.command import AZURE, RANDOM
from splitserve_bench.serve.datasets import (
    Shape,
    TracedRequest,
    at_rate,
    clipped_words,
    fit,
    longer_share,
    plan,
    random_load,
    read_azure_trace,
    read_mooncake_trace,
    trace_load,
)
from splitserve_bench.serve.records import PlannedRequest

MOST_COUNTED: Final = 10_000  # requests of a probe
MOST_TRACED: Final = 100_000  # requests that are read of a trace
SAMPLE: Final = 500  # requests from which mean lengths are told
OTHER_PROMPT: Final = 2**40  # added to a trace's hash ids each time that it begins again


@dataclass(frozen=True, slots=True)
class AskedLoad:
    """The flags of a load, as plain values that JSON can carry to the processes that simulate."""

    dataset_name: str
    dataset_path: str
    length_scale: float
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    burstiness: float
    seed: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a data set."""

    mean_input_tokens: float
    mean_output_tokens: float
    longest_tokens: int  # prompt and answer together


class Loads:
    """What is drawn for one seed is kept: all rates and plans have the same requests."""

    def __init__(self, asked: AskedLoad, vocab_size: int, max_model_len: int) -> None:
        """Raises BenchError for a trace that cannot be used."""
        self._asked, self._vocab_size, self._max_model_len = asked, vocab_size, max_model_len
        self._traced = _traced(asked)
        self._shapes: dict[int, list[Shape]] = {}
        self._rngs: dict[int, Random] = {}  # of the next random shapes

    def load(self, rate: float, num_requests: int, seed: int) -> list[PlannedRequest]:
        """Return `num_requests` requests that are sent at a mean of `rate` a second.

        The seed draws them; another rate changes only their times. A trace keeps its own gaps, scaled.
        """
        return plan(self._drawn(num_requests, seed), self._times_s(rate, num_requests, seed))

    def lengths(self) -> Lengths:
        shapes = self._drawn(SAMPLE, 0)
        longest = max(len(each.prompt) + each.output_tokens for each in shapes)
        inputs, outputs = sum(len(each.prompt) for each in shapes), sum(each.output_tokens for each in shapes)
        return Lengths(inputs / len(shapes), outputs / len(shapes), longest)

    def clipped(self) -> str:
        """How many of the data set's requests are longer than the model takes, and so clipped, in words; "" of none."""
        lengths = [each.input_tokens + each.output_tokens for each in self._traced]
        lengths = lengths or [len(each.prompt) + each.output_tokens for each in self._random(SAMPLE, self._rng(0))]
        return clipped_words(longer_share(lengths, self._max_model_len), self._max_model_len)

    def _drawn(self, num_requests: int, seed: int) -> list[Shape]:
        """The first requests of a seed; those that were not drawn before are now."""
        shapes = self._shapes.setdefault(seed, [])
        first, num_missing = len(shapes), num_requests - len(shapes)
        if num_missing > 0:
            if self._traced:
                traced = self._stretch(first, num_missing, seed)
                new = trace_load(traced, self._vocab_size, self._asked.seed + seed, first)
            else:
                new = self._random(num_missing, self._rngs.setdefault(seed, self._rng(seed)))
            shapes += fit(new, self._max_model_len).shapes
        return shapes[:num_requests]

    def _rng(self, seed: int) -> Random:
        return Random(f"{self._asked.seed} {seed} shapes")

    def _random(self, num_requests: int, rng: Random) -> list[Shape]:
        asked = self._asked
        lengths = (asked.random_input_len, asked.random_output_len, asked.random_range_ratio)
        return random_load(num_requests, *lengths, self._vocab_size, rng)

    def _times_s(self, rate: float, num_requests: int, seed: int) -> list[float]:
        if self._traced:
            return [each.at_s for each in at_rate(self._stretch(0, num_requests, seed), rate)]
        rng = Random(f"{self._asked.seed} {seed} arrivals")
        return send_times_s(num_requests, rate, self._asked.burstiness, rng)

    def _stretch(self, first: int, num_requests: int, seed: int) -> Sequence[TracedRequest]:
        """So many from the first on of those that begin at a place which the seed chooses; after the last request of
        the trace comes its first, a mean gap later."""
        traced = self._traced
        start = first + Random(f"{self._asked.seed} {seed} stretch").randrange(len(traced))
        span_s = traced[-1].at_s - traced[0].at_s
        round_s = span_s * len(traced) / max(1, len(traced) - 1)
        requests = []
        for place in range(start, start + num_requests):
            turn, index = divmod(place, len(traced))
            each = traced[index]
            ids = tuple(hash_id + turn * OTHER_PROMPT for hash_id in each.hash_ids)
            requests.append(replace(each, at_s=each.at_s + turn * round_s, hash_ids=ids))
        return requests


def _traced(asked: AskedLoad) -> list[TracedRequest]:
    if asked.dataset_name == RANDOM:
        return []
    read = read_azure_trace if asked.dataset_name == AZURE else read_mooncake_trace
    return read(Path(asked.dataset_path), length_scale=asked.length_scale, limit=MOST_TRACED)
