"""Compute latencies as vLLM's `bench serve` defines them, attainment, and its interval from the outcomes of a load.

- TTFT: first token - sent. Latencies count from the moment a request was sent, not from when it was to be sent;
  how late the generator was is the send lag (vLLM: client_queue_time), and reported beside them.
- TPOT: (last token - first token) / (tokens - 1). An output of one token has none, and meets every limit on it.
- ITL: the gaps between moments at which tokens came. TTST: second token - first token, 0 when both came at once.
- E2EL: end of the output - sent.
- Attainment: the share of the *offered* requests that met all limits. A failed or refused request is a miss.

Misses come in clusters: a queue that has grown delays many requests, not one. A run of such requests says no more than
a smaller number of independent ones: their number divided by the design effect, 1 + 2 x the sum of the
autocorrelations. The sum is Geyer's initial positive sequence: lags in pairs, as long as a pair's sum is positive.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from coordinator.control.slo import MAX_MS, MS
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.records import Outcome, PlannedRequest, is_complete

GOODPUT_NAMES: Final = ("ttft", "tpot", "e2el")
# By the field names of answers.Timeline: the first token comes at the end of the prefill.
FIRST_TOKEN_PHASES: Final = ("prefill_queue_s", "prefill_s")
LATER_PHASES: Final = ("kv_alloc_s", "kv_transfer_s", "decode_queue_s", "decode_s")
PHASE_FIELDS: Final = FIRST_TOKEN_PHASES + LATER_PHASES
MAX_ERRORS: Final = 5  # that are listed
CONFIDENCE: Final = 0.95
Z: Final = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request does not exceed, in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def by_name(self) -> dict[str, float]:
        """Return the limits that are set, in seconds, by vLLM's names."""
        limits = zip(GOODPUT_NAMES, (self.ttft_s, self.tpot_s, self.e2el_s), strict=True)
        return {name: limit for name, limit in limits if limit is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} ≤ {limit_s * MS:g} ms" for name, limit_s in self.by_name().items())


def parse_goodput(words: Sequence[str]) -> Limits:
    """Return the limits of words such as `ttft:500 tpot:30`, in milliseconds, each word one or several pairs.

    A later pair of the same name replaces an earlier one. Raises BenchError for a pair of another form or below 0.
    """
    limits_ms = parse_pairs(words, "a limit is NAME:MILLISECONDS, 0 or more", lambda value: value >= 0)
    return Limits(**{f"{name}_s": limit_ms / MS for name, limit_ms in limits_ms.items()})


def parse_pairs(words: Sequence[str], what: str, is_allowed: Callable[[float], bool]) -> dict[str, float]:
    """Return finite numbers by ttft, tpot or e2el from words of one or several NAME:NUMBER pairs; later pairs win.

    Raises BenchError, which begins with `what`, for another form and for a number that `is_allowed` refuses.
    """
    numbers: dict[str, float] = {}
    for pair in (pair for word in words for pair in word.split()):
        name, _, text = pair.partition(":")
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = math.nan
        if name not in GOODPUT_NAMES or not (math.isfinite(numbers[name]) and is_allowed(numbers[name])):
            raise BenchError(f"{what}, with a name of {', '.join(GOODPUT_NAMES)}; not {pair!r}")
    return numbers


def with_limits(
    planned: Iterable[PlannedRequest], limits_of: Callable[[PlannedRequest], Limits]
) -> list[PlannedRequest]:
    """Return the requests with the limits on TTFT and TPOT that `limits_of` has for each, to be sent to the server.

    Limits that a server refuses, 0 or more than MAX_MS, are left out, and so are those on E2EL.
    """

    def limit_ms(limit_s: float | None) -> float | None:
        return limit_s * MS if limit_s is not None and 0 < limit_s * MS <= MAX_MS else None

    pairs = ((each, limits_of(each)) for each in planned)
    return [replace(each, ttft_ms=limit_ms(limits.ttft_s), tpot_ms=limit_ms(limits.tpot_s)) for each, limits in pairs]


def in_ms(seconds: float | None) -> float | None:
    """Return seconds as milliseconds; None for None."""
    return None if seconds is None else seconds * MS


# ---- one request ----


def ttft_s(outcome: Outcome) -> float | None:
    """Return the time to first token in seconds; None when no token came."""
    return outcome.arrivals_s[0] - outcome.sent_s if outcome.arrivals_s else None


def tpot_s(outcome: Outcome) -> float | None:
    """Return the time per token after the first in seconds; None when less than two tokens came."""
    if not outcome.arrivals_s or outcome.num_output_tokens < 2:
        return None
    return (outcome.arrivals_s[-1] - outcome.arrivals_s[0]) / (outcome.num_output_tokens - 1)


def itls_s(outcome: Outcome) -> list[float]:
    """Return the seconds between each two moments at which tokens came."""
    return [later - earlier for earlier, later in pairwise(outcome.arrivals_s)]


def ttst_s(outcome: Outcome) -> float | None:
    """Return the seconds from the first to the second token; None when less than two tokens came."""
    if outcome.arrival_tokens and outcome.arrival_tokens[0] > 1:
        return 0.0
    return outcome.arrivals_s[1] - outcome.arrivals_s[0] if len(outcome.arrivals_s) > 1 else None


def e2el_s(outcome: Outcome) -> float:
    """Return the seconds from sending to the end of the request."""
    return outcome.ended_s - outcome.sent_s


def send_lag_s(outcome: Outcome) -> float:
    """Return how many seconds later than planned a request was sent, with its wait under a bound on concurrency."""
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
    """Return the names of the limits that a complete request missed. One without tokens misses a limit on TTFT."""
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
    """Return whether a request is complete and met every limit; a limit that is reached exactly is met."""
    return is_complete(outcome) and not missed(outcome, limits)


class Judged(NamedTuple):
    """An outcome and its limits."""

    outcome: Outcome
    limits: Limits

    @property
    def is_good(self) -> bool:
        """Return whether the request is complete and met its limits."""
        return is_good(self.outcome, self.limits)


# ---- a load ----


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of one kind, whatever their unit. Statistics of no values are None."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """Return the mean; None without values."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def median(self) -> float | None:
        """Return the median; None without values."""
        return self.percentile(50)

    @property
    def std(self) -> float | None:
        """Return the standard deviation of the values, divided by n; None without values."""
        return statistics.pstdev(self.values) if self.values else None

    @property
    def max(self) -> float | None:
        """Return the greatest value; None without values."""
        return max(self.values, default=None)

    def percentile(self, percent: float) -> float | None:
        """Return a percentile (0 to 100), interpolated as numpy does by default; None without values."""
        if not self.values:
            return None
        values = sorted(self.values)
        below, beyond = divmod((len(values) - 1) * percent / 100, 1)
        low, high = values[int(below)], values[min(int(below) + 1, len(values) - 1)]
        return low + (high - low) * beyond


@dataclass(frozen=True, slots=True)
class Misses:
    """How many requests missed, by cause. A complete request may miss several limits.

    ttft_phases and tpot_phases say for how many of the ttft and tpot misses which phase took most beyond the median of
    the good requests (beyond 0 when none was good), most frequent first, of the requests with a timeline. For TTFT
    those are the phases up to the first token. For TPOT they are the later ones, their seconds divided by the tokens
    after the first, so that a long output counts for nothing by itself.
    """

    ttft: int
    tpot: int
    e2el: int
    failed: int
    refused: int
    ttft_phases: Mapping[str, int]
    tpot_phases: Mapping[str, int]

    @property
    def causes(self) -> list[tuple[str, int, Mapping[str, int]]]:
        """Return name, count and phases of each cause with misses, the most frequent first."""
        causes: list[tuple[str, int, Mapping[str, int]]] = [
            ("TTFT", self.ttft, self.ttft_phases),
            ("TPOT", self.tpot, self.tpot_phases),
            ("E2EL", self.e2el, {}),
            ("failures", self.failed, {}),
            ("refusals", self.refused, {}),
        ]
        return sorted((cause for cause in causes if cause[1]), key=lambda cause: -cause[1])


@dataclass(frozen=True, slots=True)
class Returned:
    """Requests that were sent again after a refusal, and what became of the last sending of each."""

    num: int
    num_admitted: int  # not refused again
    num_good: int


@dataclass(frozen=True)
class Summary:
    """The figures of a load with one outcome a request. Latencies, tokens and phases are those of complete requests.

    `limits` are those of every request, empty where each has its own. duration_s is from the start of the load to the
    end of its last request.
    """

    judged: tuple[Judged, ...]
    limits: Limits
    duration_s: float

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Return all outcomes, in the order of the load."""
        return tuple(each.outcome for each in self.judged)

    @cached_property
    def complete(self) -> list[Outcome]:
        """Return the outcomes that neither failed nor were refused."""
        return [outcome for outcome in self.outcomes if is_complete(outcome)]

    @property
    def num_offered(self) -> int:
        """Return the number of all requests."""
        return len(self.outcomes)

    @property
    def num_completed(self) -> int:
        """Return the number of complete requests."""
        return len(self.complete)

    @property
    def num_failed(self) -> int:
        """Return the number of requests that are not complete, refused ones included, as vLLM does."""
        return self.num_offered - self.num_completed

    @property
    def num_refused(self) -> int:
        """Return the number of refused requests."""
        return sum(outcome.is_refused for outcome in self.outcomes)

    @cached_property
    def are_good(self) -> list[bool]:
        """Return which requests were good, in the order in which they were due.

        Without limits all complete ones are.
        """
        in_order = sorted(self.judged, key=lambda each: (each.outcome.scheduled_s, each.outcome.index))
        return [each.is_good for each in in_order]

    @cached_property
    def num_effective(self) -> float:
        """Return how many independent requests would say as much about the attainment."""
        return effective_size(self.are_good)

    @property
    def num_good(self) -> int:
        """Return the number of good requests."""
        return sum(self.are_good)

    @property
    def attainment(self) -> float:
        """Return the share of good requests among all; 0 without any."""
        return self.num_good / self.num_offered if self.outcomes else 0.0

    @property
    def attainment_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the attainment."""
        return interval(self.attainment, self.num_effective)

    @property
    def request_goodput_per_s(self) -> float:
        """Return the good requests a second."""
        return self.per_s(self.num_good)

    @property
    def total_input_tokens(self) -> int:
        """Return the prompt tokens of complete requests."""
        return sum(outcome.num_prompt_tokens for outcome in self.complete)

    @property
    def total_output_tokens(self) -> int:
        """Return the output tokens of complete requests."""
        return sum(outcome.num_output_tokens for outcome in self.complete)

    @property
    def max_output_tokens_per_s(self) -> float:
        """Return the tokens that came in the best second.

        Seconds are counted from the first sending of a complete request.
        """
        first_s = min((outcome.sent_s for outcome in self.complete), default=0.0)
        tokens: Counter[int] = Counter()
        for outcome in self.complete:
            for at_s, num_tokens in zip(outcome.arrivals_s, outcome.arrival_tokens, strict=True):
                tokens[int(at_s - first_s)] += num_tokens
        return float(max(tokens.values(), default=0))

    @property
    def max_concurrent_requests(self) -> int:
        """Return the most requests under way at one moment.

        One that ends as another is sent is not under way with it.
        """
        changes = [(each.sent_s, 1) for each in self.outcomes] + [(each.ended_s, -1) for each in self.outcomes]
        return max(accumulate(change for _, change in sorted(changes)), default=0)

    @cached_property
    def latencies_s(self) -> dict[str, Distribution]:
        """Return the latencies in seconds, by the names of LATENCIES."""
        return {
            name: Distribution(tuple(value for each in self.complete for value in values_of(each) if value is not None))
            for name, values_of in LATENCIES.items()
        }

    @property
    def send_lag_s(self) -> Distribution:
        """Return the send lag in seconds of all requests."""
        return Distribution(tuple(map(send_lag_s, self.outcomes)))

    @property
    def phases_s(self) -> dict[str, float]:
        """Return the mean seconds of each phase of PHASE_FIELDS, of the requests with a timeline; empty without any."""
        timelines = [each.timeline for each in self.complete if each.timeline is not None]
        if not timelines:
            return {}
        return {name: statistics.fmean(each.get(name, 0.0) for each in timelines) for name in PHASE_FIELDS}

    @property
    def cached_share(self) -> float | None:
        """Return the share of prompt tokens that were in the prefix cache; None when no server reports them."""
        known = [each for each in self.complete if each.num_cached_tokens is not None]
        cached = sum(each.num_cached_tokens or 0 for each in known)
        return cached / sum(each.num_prompt_tokens for each in known) if known else None

    @cached_property
    def misses(self) -> Misses:
        """Return how many requests missed, by cause."""
        return count_misses([(each.outcome, missed(*each)) for each in self.judged])

    @property
    def returned(self) -> Returned:
        """Return how many requests were sent again, and what became of them."""
        again = [each for each in self.judged if each.outcome.num_refusals_before]
        num_admitted = sum(not each.outcome.is_refused for each in again)
        return Returned(len(again), num_admitted, sum(each.is_good for each in again))

    @property
    def frequent_errors(self) -> list[tuple[str, int]]:
        """Return the MAX_ERRORS most frequent errors of failed and refused requests, with their counts."""
        errors = Counter(outcome.error for outcome in self.outcomes if not is_complete(outcome))
        return errors.most_common(MAX_ERRORS)

    def per_s(self, count: float) -> float:
        """Return `count` divided by the seconds of the whole load; 0 for a load that took no time."""
        return count / self.duration_s if self.duration_s > 0 else 0.0

    def attainment_of(self, name: str) -> float | None:
        """Return the share of requests within the limit ttft, tpot or e2el alone.

        None when that limit is not set, or without requests.
        """
        limit_s = self.limits.by_name().get(name)
        if limit_s is None or not self.outcomes:
            return None
        one = Limits(**{f"{name}_s": limit_s})
        return sum(is_good(outcome, one) for outcome in self.outcomes) / len(self.outcomes)


def summarize(outcomes: Sequence[Outcome], limits: Limits, duration_s: float | None = None) -> Summary:
    """Return the figures of a load whose requests have the same limits, one outcome a request.

    duration_s is until the last request ended, unless it is given.
    """
    summary = summarize_judged([Judged(outcome, limits) for outcome in outcomes])
    return replace(summary, limits=limits, duration_s=summary.duration_s if duration_s is None else duration_s)


def summarize_judged(judged: Sequence[Judged]) -> Summary:
    """Return the figures of a load whose requests each have limits of their own."""
    return Summary(tuple(judged), Limits(), max((each.outcome.ended_s for each in judged), default=0.0))


def count_misses(judged: Sequence[tuple[Outcome, tuple[str, ...]]]) -> Misses:
    """Return the misses by cause of requests, given with the names of the limits that each missed."""
    complete = [(outcome, names) for outcome, names in judged if is_complete(outcome)]
    num_refused = sum(outcome.is_refused for outcome, _ in judged)
    limits = Counter(name for _, names in complete for name in names)
    return Misses(
        ttft=limits["ttft"],
        tpot=limits["tpot"],
        e2el=limits["e2el"],
        failed=len(judged) - len(complete) - num_refused,
        refused=num_refused,
        ttft_phases=_longest_phases(complete, "ttft", FIRST_TOKEN_PHASES),
        tpot_phases=_longest_phases(complete, "tpot", LATER_PHASES),
    )


def _longest_phases(
    complete: Sequence[tuple[Outcome, tuple[str, ...]]], limit: str, phases: tuple[str, ...]
) -> dict[str, int]:
    good: list[dict[str, float]] = []
    bad: list[dict[str, float]] = []
    for outcome, names in complete:
        if outcome.timeline is None:
            continue
        parts = 1 if limit == "ttft" else max(1, outcome.num_output_tokens - 1)
        seconds = {name: outcome.timeline.get(name, 0.0) / parts for name in phases}
        if limit in names:
            bad.append(seconds)
        elif not names:
            good.append(seconds)
    usual = {name: statistics.median(each[name] for each in good) if good else 0.0 for name in phases}
    longest = Counter(max(phases, key=lambda name: each[name] - usual[name]) for each in bad)
    return dict(longest.most_common())


# ---- how sure a share is ----


def effective_size(series: Sequence[int]) -> float:
    """Return how many independent requests say as much about the mean as this series, which is in the order of sending.

    It has 1 for a good request and 0 for another, or the differences of two contenders' series. At least 2 of 2 or
    more; all of them when they are all alike, as nothing shows how they cluster.
    """
    num = len(series)
    if num < 3 or len(set(series)) == 1:
        return float(num)
    product_at = _products_of(series)
    variance = product_at(0)
    total = -variance
    for lag in range(0, num - 1, 2):
        pair = product_at(lag) + product_at(lag + 1)
        if pair <= 0:
            break
        total += 2 * pair
    return num / min(max(1.0, total / variance), num / 2)


def _products_of(series: Sequence[int]) -> Callable[[int], int]:
    """Return a function of the lag: the series' autocovariance times the square of its length.

    The series has values -1, 0 and 1, so that this is a whole number with an exact sign. They are held as bits, which
    count many places at once.
    """
    num, total = len(series), sum(series)
    sums = [0, *accumulate(series)]
    ones, minus_ones = (int("".join("01"[each == value] for each in series), 2) for value in (1, -1))

    def product_at(lag: int) -> int:
        alike = (ones & ones >> lag).bit_count() + (minus_ones & minus_ones >> lag).bit_count()
        unlike = (ones & minus_ones >> lag).bit_count() + (minus_ones & ones >> lag).bit_count()
        ends = sums[num - lag] + total - sums[lag]
        return num * num * (alike - unlike) - num * total * ends + (num - lag) * total * total

    return product_at


def interval(share: float, size: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share that was found in `size` independent requests; (0, 1) for 0.

    The share is always in it.
    """
    if size == 0:
        return 0.0, 1.0
    spread = Z * Z / size
    half = Z * math.sqrt(share * (1 - share) / size + spread / (4 * size))
    middle = share + spread / 2
    return min(share, max(0.0, (middle - half) / (1 + spread))), max(share, min(1.0, (middle + half) / (1 + spread)))


def paired_interval(share_one: float, share_other: float, size: float) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares that were found in the same `size` independent requests.

    `share_one` of them were good with the first contender alone, `share_other` with the other alone; (-1, 1) for a size
    of 0. share_one - share_other is always in it.

    That of Bonett and Price (2012), "Adjusted Wald confidence interval for a difference of binomial proportions based
    on paired data", J. Educ. Behav. Stat. 37: Wald's for paired data after one more request of either kind was added.
    Requests that are equal with both say nothing about the difference, as in McNemar's test.
    """
    if size == 0:
        return -1.0, 1.0
    difference = share_one - share_other
    one, other = ((share * size + 1) / (size + 2) for share in (share_one, share_other))
    half = Z * math.sqrt((one + other - (one - other) ** 2) / (size + 2))
    return min(difference, max(-1.0, one - other - half)), max(difference, min(1.0, one - other + half))
