"""What a load is, and what becomes of it, as plain data. Times are seconds after the start of the load."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load. Its answer has exactly output_tokens tokens: the end-of-sequence token does not end it,
    unless it is heeded (ignore_eos): then the answer may be shorter. A prompt that is text is sent as such. The limits
    are those that the server is told, None where it is told none. One that is sent again has been refused before."""

    index: int
    send_at_s: float
    prompt: tuple[int, ...]  # token ids
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    text: str = ""  # the prompt before it was made token ids
    ignore_eos: bool = True
    num_refusals_before: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request, as its client saw it, or of one sending of it where it is sent again after a refusal.
    Whatever has an error is a miss, tokens or not.

    `arrivals_s` are the moments at which tokens came and `arrival_tokens` how many came at each; where the server does
    not say how many, they are 1 each, and num_output_tokens, the server's own count, may be larger than their sum.
    """

    index: int
    scheduled_s: float  # when it was to be sent
    sent_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    arrivals_s: tuple[float, ...]
    arrival_tokens: tuple[int, ...]
    ended_s: float
    error: str = ""  # "" for a complete answer
    is_refused: bool = False  # the server turned it away: a full queue, a limit, no node
    retry_after_s: float | None = None  # when it may be sent again, where the server that turned it away says so
    # Seconds as the server tells them, by the field names of answers.Timeline, and is_late; None when it tells none. Of
    # a refused request: what was expected of it, and how long nodes had it, if any had.
    timeline: Mapping[str, float] | None = None
    num_cached_tokens: int | None = None  # of the prompt, that were not computed; None when it does not tell
    num_refusals_before: int = 0  # of the same request


def returns_at_s(outcome: Outcome, most_repeats: int, patience_s: float) -> float | None:
    """Return when a client that obeys the server sends the request again. None where it does not: the request was not
    refused, or not told to come back within patience_s, or has been sent again most_repeats times."""
    retry_after_s = outcome.retry_after_s if outcome.is_refused else None
    if retry_after_s is None or retry_after_s > patience_s or outcome.num_refusals_before >= most_repeats:
        return None
    return outcome.ended_s + retry_after_s


def last_sendings(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return what became of each request in the end, of outcomes in which its sendings follow each other."""
    return list({outcome.index: outcome for outcome in outcomes}.values())


@dataclass(frozen=True, slots=True)
class TierUse:
    """What the second tiers of all nodes have done: full blocks that were read back, and those of prompts that were in
    no tier, or faster computed; seconds that prompts waited for them, and what computing would have taken beyond that,
    as the nodes reckon."""

    block_tokens: int
    num_hits: int
    num_misses: int
    read_s: float
    saved_s: float

    @property
    def hit_rate(self) -> float:
        """Of the full blocks that the pools did not hold, those read back."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)
