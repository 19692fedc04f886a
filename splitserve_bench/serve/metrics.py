"""What the outcomes of a load amount to: latencies as vLLM's `bench serve` defines them, and attainment.

- TTFT: first token - sent. Latencies count from the moment a request was sent, not from when it was to be sent;
  how late the generator was is the send lag (vLLM: client_queue_time), and reported beside them.
- TPOT: (last token - first token) / (tokens - 1). An answer of one token has none, and meets every limit on it.
- ITL: the gaps between moments at which tokens came. TTST: second token - first token, 0 when both came at once.
- E2EL: end of the answer - sent.
- Attainment: the share of the *offered* requests that met all limits. What failed or was turned away is a miss.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.misses import Misses, count_misses, is_complete, phase_means
from splitserve_bench.serve.records import Outcome
from splitserve_bench.serve.spread import effective_size, interval

GOODPUT_NAMES: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request does not exceed, in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def by_name(self) -> dict[str, float]:
        """The limits that are set, in seconds, by vLLM's names."""
        limits = zip(GOODPUT_NAMES, (self.ttft_s, self.tpot_s, self.e2el_s), strict=True)
        return {name: limit for name, limit in limits if limit is not None}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of one kind, whatever their unit. Without values there is no mean and no percentile: None."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def median(self) -> float | None:
        return self.percentile(50)

    @property
    def std(self) -> float | None:
        """Of these values, not of what they may be a sample of: divided by n."""
        return statistics.pstdev(self.values) if self.values else None

    @property
    def max(self) -> float | None:
        return max(self.values, default=None)

    def percentile(self, percent: float) -> float | None:
        """Linear between the two values beside it, as numpy's default."""
        if not self.values:
            return None
        values = sorted(self.values)
        below, beyond = divmod((len(values) - 1) * percent / 100, 1)
        low, high = values[int(below)], values[min(int(below) + 1, len(values) - 1)]
        return low + (high - low) * beyond


@dataclass(frozen=True, slots=True)
class Returned:
    """How many requests were sent again when they had been told to, and what became of their last sending."""

    num: int
    num_admitted: int  # not refused again
    num_good: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A load in figures. Latencies, tokens and phases are those of the complete answers.

    duration_s is from the start of the load to its last answer. attainment counts complete answers when there are no
    limits; attainment_ttft and _tpot look at one limit alone, None when it is not set. max_concurrent_requests are
    all that were under way at one moment; max_output_tokens_per_s is of the best second, seconds counted from the
    first send. phases_s are means by the field names of answers.Timeline, empty when the server tells none.
    cached_share is of the prompt tokens, those that were not computed; None when the server does not tell.
    """

    outcomes: tuple[Outcome, ...]
    limits: Limits
    duration_s: float
    num_completed: int
    num_refused: int
    num_good: int
    attainment: float
    attainment_interval: tuple[float, float]  # at 95 %, with misses that come in clusters reckoned with (spread.py)
    attainment_ttft: float | None
    attainment_tpot: float | None
    total_input_tokens: int
    total_output_tokens: int
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latencies_s: dict[str, Distribution]  # by the names of LATENCIES
    send_lag_s: Distribution  # of all requests
    phases_s: dict[str, float]
    cached_share: float | None
    misses: Misses
    returned: Returned

    @property
    def num_offered(self) -> int:
        return len(self.outcomes)

    @property
    def num_failed(self) -> int:
        """What is not complete, refused requests included, as vLLM counts."""
        return self.num_offered - self.num_completed

    @property
    def request_goodput_per_s(self) -> float:
        return self.per_s(self.num_good)

    def per_s(self, count: float) -> float:
        """A rate over the whole load; 0 for a load that took no time."""
        return count / self.duration_s if self.duration_s > 0 else 0.0


def parse_goodput(words: Sequence[str]) -> Limits:
    """Limits from words such as `ttft:500 tpot:30`, in milliseconds, each word one or several such pairs; a later pair
    of the same name wins. Anything else is a BenchError."""
    limits_ms = parse_pairs(words, "a limit is NAME:MILLISECONDS", _milliseconds)
    return Limits(**{f"{name}_s": limit_ms / 1e3 for name, limit_ms in limits_ms.items()})


def parse_pairs(words: Sequence[str], what: str, number: Callable[[str, str], float]) -> dict[str, float]:
    """Numbers by latency from words, each one or several pairs; a later pair of the same name wins. `number` takes the
    text of one and the whole pair. Raises BenchError, which begins with `what`, for other names."""
    numbers: dict[str, float] = {}
    for pair in (pair for word in words for pair in word.split()):
        name, separator, text = pair.partition(":")
        if name not in GOODPUT_NAMES or not separator:
            raise BenchError(f"{what} with a name of {', '.join(GOODPUT_NAMES)}, not {pair!r}")
        numbers[name] = number(text, pair)
    return numbers


def _milliseconds(text: str, pair: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise BenchError(f"{pair!r} has no number of milliseconds") from error
    if not (value >= 0 and math.isfinite(value)):
        raise BenchError(f"a limit must be 0 ms or more, not {pair!r}")
    return value


def ttft_s(outcome: Outcome) -> float | None:
    """None when no token came."""
    return outcome.arrivals_s[0] - outcome.sent_s if outcome.arrivals_s else None


def tpot_s(outcome: Outcome) -> float | None:
    """None when less than two tokens came."""
    if not outcome.arrivals_s or outcome.num_output_tokens < 2:
        return None
    return (outcome.arrivals_s[-1] - outcome.arrivals_s[0]) / (outcome.num_output_tokens - 1)


def itls_s(outcome: Outcome) -> list[float]:
    return [later - earlier for earlier, later in pairwise(outcome.arrivals_s)]


def ttst_s(outcome: Outcome) -> float | None:
    """None when less than two tokens came."""
    if outcome.arrival_tokens and outcome.arrival_tokens[0] > 1:
        return 0.0
    return outcome.arrivals_s[1] - outcome.arrivals_s[0] if len(outcome.arrivals_s) > 1 else None


def e2el_s(outcome: Outcome) -> float:
    return outcome.ended_s - outcome.sent_s


def send_lag_s(outcome: Outcome) -> float:
    """How much later than planned a request was sent; with a limit on concurrency, its wait for a free place too."""
    return outcome.sent_s - outcome.scheduled_s


# Seconds of one request, by vLLM's names and ttst.
LATENCIES: Final[dict[str, Callable[[Outcome], Sequence[float | None]]]] = {
    "ttft": lambda outcome: [ttft_s(outcome)],
    "tpot": lambda outcome: [tpot_s(outcome)],
    "itl": itls_s,
    "e2el": lambda outcome: [e2el_s(outcome)],
    "ttst": lambda outcome: [ttst_s(outcome)],
    "client_queue_time": lambda outcome: [send_lag_s(outcome)],
    "e2el_including_client_queue": lambda outcome: [outcome.ended_s - outcome.scheduled_s],
}


def missed(outcome: Outcome, limits: Limits) -> tuple[str, ...]:
    """Which limits a complete answer missed, by name. A limit on TTFT is missed by an answer without tokens."""
    names = []
    first_s, each_s = ttft_s(outcome), tpot_s(outcome)
    if limits.ttft_s is not None and (first_s is None or first_s > limits.ttft_s):
        names.append("ttft")
    if limits.tpot_s is not None and each_s is not None and each_s > limits.tpot_s:
        names.append("tpot")
    if limits.e2el_s is not None and e2el_s(outcome) > limits.e2el_s:
        names.append("e2el")
    return tuple(names)


def is_good(outcome: Outcome, limits: Limits) -> bool:
    """A complete answer that met every limit; a limit that is reached exactly is met."""
    return is_complete(outcome) and not missed(outcome, limits)


def summarize(outcomes: Sequence[Outcome], limits: Limits, duration_s: float | None = None) -> Summary:
    """All figures of a load, of which each request has one outcome. duration_s is until its last request ended, unless
    given."""
    complete = [outcome for outcome in outcomes if is_complete(outcome)]
    in_order = sorted(outcomes, key=lambda outcome: (outcome.scheduled_s, outcome.index))
    are_good = [is_good(outcome, limits) for outcome in in_order]
    num_good = sum(are_good)
    attainment = num_good / len(are_good) if are_good else 0.0
    return Summary(
        outcomes=tuple(outcomes),
        limits=limits,
        duration_s=max((each.ended_s for each in outcomes), default=0.0) if duration_s is None else duration_s,
        num_completed=len(complete),
        num_refused=sum(outcome.is_refused for outcome in outcomes),
        num_good=num_good,
        attainment=attainment,
        attainment_interval=interval(attainment, effective_size(are_good)),
        attainment_ttft=_attainment(outcomes, Limits(ttft_s=limits.ttft_s)),
        attainment_tpot=_attainment(outcomes, Limits(tpot_s=limits.tpot_s)),
        total_input_tokens=sum(outcome.num_prompt_tokens for outcome in complete),
        total_output_tokens=sum(outcome.num_output_tokens for outcome in complete),
        max_output_tokens_per_s=_peak_tokens_per_s(complete),
        max_concurrent_requests=_peak_requests(outcomes),
        latencies_s={name: _distribution(complete, values_of) for name, values_of in LATENCIES.items()},
        send_lag_s=Distribution(tuple(send_lag_s(outcome) for outcome in outcomes)),
        phases_s=phase_means(complete),
        cached_share=_cached_share(complete),
        misses=count_misses([(outcome, missed(outcome, limits)) for outcome in outcomes]),
        returned=_returned([outcome for outcome in outcomes if outcome.num_refusals_before], limits),
    )


def _returned(outcomes: Sequence[Outcome], limits: Limits) -> Returned:
    num_admitted = sum(not outcome.is_refused for outcome in outcomes)
    return Returned(len(outcomes), num_admitted, sum(is_good(outcome, limits) for outcome in outcomes))


def _attainment(outcomes: Sequence[Outcome], one: Limits) -> float | None:
    if not one.by_name() or not outcomes:
        return None
    return sum(is_good(outcome, one) for outcome in outcomes) / len(outcomes)


def _cached_share(complete: Sequence[Outcome]) -> float | None:
    told = [(each.num_cached_tokens, each.num_prompt_tokens) for each in complete if each.num_cached_tokens is not None]
    return sum(cached for cached, _ in told) / sum(prompt for _, prompt in told) if told else None


def _distribution(complete: Sequence[Outcome], values_of: Callable[[Outcome], Sequence[float | None]]) -> Distribution:
    return Distribution(tuple(value for outcome in complete for value in values_of(outcome) if value is not None))


def _peak_tokens_per_s(complete: Sequence[Outcome]) -> float:
    first_s = min((outcome.sent_s for outcome in complete), default=0.0)
    tokens: dict[int, int] = {}
    for outcome in complete:
        for at_s, num_tokens in zip(outcome.arrivals_s, outcome.arrival_tokens, strict=True):
            second = int(at_s - first_s)
            tokens[second] = tokens.get(second, 0) + num_tokens
    return float(max(tokens.values(), default=0))


def _peak_requests(outcomes: Sequence[Outcome]) -> int:
    """A request that ends at the moment at which another is sent is not beside it."""
    changes = sorted([(each.sent_s, 1) for each in outcomes] + [(each.ended_s, -1) for each in outcomes])
    return max(accumulate(change for _, change in changes), default=0)
