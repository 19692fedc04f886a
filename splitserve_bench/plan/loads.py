"""Make the loads of a search: the same requests for every plan, at any rate. A trace begins again when it ends."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Final

from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.command import dataset_of
from splitserve_bench.serve.datasets import (
    Shape,
    TracedRequest,
    at_rate,
    clipped_words,
    fit,
    plan,
)
from splitserve_bench.serve.records import PlannedRequest

MOST_COUNTED: Final = 10_000  # requests of a probe
MOST_TRACED: Final = 100_000  # requests that are read of a trace
SAMPLE: Final = 500  # requests from which mean lengths are estimated
OTHER_PROMPT: Final = 2**40  # added to a trace's hash ids each time that it begins again


@dataclass(frozen=True, slots=True)
class LoadOptions:
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
    """The lengths of a data set's requests, in tokens."""

    mean_input_tokens: float
    mean_output_tokens: float
    longest_tokens: int  # prompt and answer together


class Loads:
    """Make loads. What is drawn for one seed is kept, so that all rates and plans have the same requests."""

    def __init__(self, options: LoadOptions, vocab_size: int, max_model_len: int) -> None:
        """Read the trace, if there is one. Raises BenchError when it cannot be used."""
        from splitserve_bench.serve.workload import Source  # reads tokenizers too, unlike help

        self._options, self._max_model_len = options, max_model_len
        self._source = Source(dataset_of(asdict(options)), vocab_size, None, MOST_TRACED)
        self._shapes: dict[int, list[Shape]] = {}
        self._rngs: dict[int, Random] = {}  # of the next random shapes

    def load(self, rate: float, num_requests: int, seed: int) -> list[PlannedRequest]:
        """Return `num_requests` requests that are sent at a mean of `rate` a second.

        The seed draws them; another rate changes only their times. A trace keeps its own gaps, scaled.
        """
        return plan(self._drawn(num_requests, seed), self._times_s(rate, num_requests, seed))

    def lengths(self) -> Lengths:
        """Return the lengths of the data set's requests, from the first SAMPLE of them."""
        shapes = self._drawn(SAMPLE, 0)
        longest = max(len(each.prompt) + each.output_tokens for each in shapes)
        inputs, outputs = sum(len(each.prompt) for each in shapes), sum(each.output_tokens for each in shapes)
        return Lengths(inputs / len(shapes), outputs / len(shapes), longest)

    def clipped(self) -> str:
        """Return in words how many requests of the data set are too long for the model and so clipped; "" for none."""
        share = self._source.clipped_share(self._max_model_len, SAMPLE, self._rng(0))
        return clipped_words(share, self._max_model_len)

    def _drawn(self, num_requests: int, seed: int) -> list[Shape]:
        """Return the first requests of a seed, and draw those that were not drawn before."""
        shapes = self._shapes.setdefault(seed, [])
        first, num_missing = len(shapes), num_requests - len(shapes)
        if num_missing > 0:
            if self._source.traced:
                traced = self._stretch(first, num_missing, seed)
                new = self._source.replayed(traced, self._options.seed + seed, first)
            else:
                new = self._source.drawn(num_missing, self._rngs.setdefault(seed, self._rng(seed)))
            shapes += fit(new, self._max_model_len).shapes
        return shapes[:num_requests]

    def _rng(self, seed: int) -> Random:
        return Random(f"{self._options.seed} {seed} shapes")

    def _times_s(self, rate: float, num_requests: int, seed: int) -> list[float]:
        if self._source.traced:
            return [each.at_s for each in at_rate(self._stretch(0, num_requests, seed), rate)]
        rng = Random(f"{self._options.seed} {seed} arrivals")
        return send_times_s(num_requests, rate, self._options.burstiness, rng)

    def _stretch(self, first: int, num_requests: int, seed: int) -> Sequence[TracedRequest]:
        """Return requests of the trace, from number `first` on after a place that the seed chooses.

        After the last request of the trace comes its first, a mean gap later and with other prompts.
        """
        traced = self._source.traced
        start = first + Random(f"{self._options.seed} {seed} stretch").randrange(len(traced))
        span_s = traced[-1].at_s - traced[0].at_s
        round_s = span_s * len(traced) / max(1, len(traced) - 1)
        requests = []
        for place in range(start, start + num_requests):
            turn, index = divmod(place, len(traced))
            each = traced[index]
            ids = tuple(hash_id + turn * OTHER_PROMPT for hash_id in each.hash_ids)
            requests.append(replace(each, at_s=each.at_s + turn * round_s, hash_ids=ids))
        return requests
