"""Define what a load is, where it is sent, and its outcomes. Times are seconds after the start of the load."""

import hashlib
import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from serving_core import reasons
from serving_core.errors import SplitServeError
from serving_core.net.tls import TlsFiles
from splitserve.client.answers import Timeline

SPLITSERVE, OPENAI = "splitserve", "openai"
BACKENDS: Final = (SPLITSERVE, OPENAI)
COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/chat/completions"  # ends the path of an endpoint that takes conversations
LIMITS: Final = ("ttft_ms", "tpot_ms", "slo_class", "priority")  # of every request, the same for both backends
MAX_ERROR_CHARACTERS: Final = 300
DIGEST_BYTES: Final = 8
TOKEN_TYPE: Final = "I"  # 4 bytes
# Why SplitServe refuses a request before it is begun.
REFUSALS: Final = frozenset(
    [
        reasons.QUEUE_FULL,
        reasons.WOULD_BE_LATE,
        reasons.NO_PREFILL_WORKER,
        reasons.NO_DECODE_WORKER,
        reasons.DRAINING,
    ]
)
KEPT: Final = tuple(each.name for each in fields(Timeline) if each.type in (float, bool))  # of a server's timeline


@dataclass(frozen=True, slots=True)
class Target:
    """A server that a load is sent to.

    `address` is HOST:PORT or https://HOST:PORT for splitserve, and a URL without the endpoint for openai. `extra_body`
    has more fields of every request; for splitserve only those of LIMITS.
    """

    backend: str  # one of BACKENDS
    address: str
    endpoint: str = COMPLETIONS  # of openai
    model: str = ""  # "": whatever is served
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    tls: TlsFiles = field(default_factory=TlsFiles)

    @property
    def takes_chats(self) -> bool:
        """Return whether each prompt is sent as a conversation of one message, as text."""
        return self.backend == OPENAI and self.endpoint.endswith(CHATS)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server reports of its model; None for what it does not report."""

    model: str
    max_model_len: int | None
    vocab_size: int | None


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load. Its output has exactly output_tokens tokens, or without ignore_eos at most so many.

    A prompt that has a text is sent as text. The limits are those that the server is sent, None for none.
    """

    index: int
    send_at_s: float
    prompt: Sequence[int]  # token ids
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    text: str = ""  # the prompt before it was made token ids
    ignore_eos: bool = True
    num_refusals_before: int = 0  # of the same request
    # Of a turn of a session, else None and 0. Turns count from 0; sub-agents of a session have the same one.
    session: int | None = None
    turn: int = 0
    after: tuple[int, ...] = ()  # indices of earlier requests: it is sent gap_s after the last of them has ended
    gap_s: float = 0.0
    continues: int | None = None  # one of `after`: its prompt and its output come before this prompt
    messages: tuple[str, ...] = ()  # in a chat, those before `text`: the user's and the model's in turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request, or of one of several sendings after refusals, as its client saw it.

    One with an error is a miss, whatever tokens came. `arrivals_s` are the moments at which tokens came and
    `arrival_tokens` how many came at each. Where the server does not report how many, they are 1 each, and
    num_output_tokens, the server's own count, may be larger than their sum.
    """

    index: int
    scheduled_s: float  # when it was to be sent
    sent_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    arrivals_s: tuple[float, ...]
    arrival_tokens: tuple[int, ...]
    ended_s: float
    error: str = ""  # "" for a complete output
    is_refused: bool = False  # the server turned it away: a full queue, a limit, no node
    retry_after_s: float | None = None  # when it may be sent again, where the server that turned it away says so
    # Seconds as the server tells them, by the names of KEPT; None when it tells none. Of a refused request: what was
    # expected of it, and how long nodes had it, if any had.
    timeline: Mapping[str, float] | None = None
    num_cached_tokens: int | None = None  # of the prompt, that were not computed; None when it does not tell
    num_refusals_before: int = 0  # of the same request
    session: int | None = None  # these two as in PlannedRequest
    turn: int = 0
    decode_node: str = ""  # the node that decoded it last; "" when the server does not tell


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is, `elapsed_s` seconds after its start."""

    num_planned: int
    num_sent: int
    num_completed: int
    num_failed: int  # refused, timed out, broken
    num_output_tokens: int  # of the requests that ended
    elapsed_s: float

    @property
    def num_in_flight(self) -> int:
        """Return the number of requests that have been sent and have not ended."""
        return self.num_sent - self.num_completed - self.num_failed


@dataclass(frozen=True, slots=True)
class TierUse:
    """What the KV offload of all nodes did: blocks of prompts that were loaded back (hits), or not (misses).

    Only full blocks count that the pools did not hold. Prompts waited `read_s` seconds for hits, and computing them
    would have taken `saved_s` seconds more, by the nodes' estimate.
    """

    block_tokens: int
    num_hits: int
    num_misses: int
    read_s: float
    saved_s: float

    @property
    def hit_rate(self) -> float:
        """Return the share of full blocks loaded from the KV offload, of those that missed the prefix cache."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)


class RequestFailed(SplitServeError):
    """A request without a complete output, and why.

    `is_refused`: the server turned it away; `retry_after_s`: in how many seconds it may be sent again, None when
    unknown.
    """

    def __init__(self, message: str, *, is_refused: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        self.retry_after_s = retry_after_s


class Reply:
    """Collect what comes back for one request. `now_s` returns the seconds since the start of the load."""

    def __init__(self, request: PlannedRequest, now_s: Callable[[], float]) -> None:
        self.num_prompt_tokens = len(request.prompt)
        self.num_arrived_tokens = 0
        self.num_output_tokens: int | None = None  # the server's own count, once it has sent it
        self.is_ended = False  # whether the server said that the output ends here
        self.silent_end_s: float | None = None  # when that came, if with no token that could be counted
        self.is_stopped = False  # whether it said that it ends for another reason than its length
        self.timeline: Mapping[str, float] | None = None
        self.num_cached_tokens: int | None = None
        self.decode_node = ""
        self.token_ids: list[int] = []  # of the output, as far as the server has sent them
        self.text = ""  # of the output of a chat
        self.now_s = now_s
        self._request = request
        self._sent_s = now_s()
        self._arrivals_s: list[float] = []
        self._arrival_tokens: list[int] = []

    def arrived(self, moment_s: float, num_tokens: int) -> None:
        """Record tokens that came at a moment of `now_s`."""
        self._arrivals_s.append(moment_s)
        self._arrival_tokens.append(num_tokens)
        self.num_arrived_tokens += num_tokens

    def check_complete(self) -> None:
        """Raise RequestFailed when the output has not come to its end, or has another length than wanted."""
        if not self.is_ended:
            raise RequestFailed("the stream ended before the output did")
        wanted, counted, is_exact = self._request.output_tokens, self.num_output_tokens, self._request.ignore_eos
        if counted is not None and (counted > wanted or (is_exact and counted < wanted)):
            raise RequestFailed(f"the output has {counted} tokens instead of {wanted}")
        if is_exact and counted is None and self.is_stopped:
            raise RequestFailed(f"the output stopped before it had {wanted} tokens, and nobody counted them")

    def outcome(self, error: str = "", *, is_refused: bool = False, retry_after_s: float | None = None) -> Outcome:
        """Return the outcome of the request, which ends now, with this error ("": complete).

        A request whose output has begun does not count as refused.
        """
        counted, is_refused = self.num_output_tokens, is_refused and not self._arrivals_s
        return Outcome(
            index=self._request.index,
            scheduled_s=self._request.send_at_s,
            sent_s=self._sent_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_arrived_tokens if counted is None else counted,
            arrivals_s=tuple(self._arrivals_s),
            arrival_tokens=tuple(self._arrival_tokens),
            ended_s=self.now_s(),
            error=bounded(error),
            is_refused=is_refused,
            retry_after_s=retry_after_s if is_refused else None,
            timeline=self.timeline,
            num_cached_tokens=self.num_cached_tokens,
            num_refusals_before=self._request.num_refusals_before,
            session=self._request.session,
            turn=self._request.turn,
            decode_node=self.decode_node,
        )


def is_complete(outcome: Outcome) -> bool:
    """Return whether a request neither failed nor was refused."""
    return not outcome.error and not outcome.is_refused


def returns_at_s(outcome: Outcome, most_repeats: int, patience_s: float) -> float | None:
    """Return when a client that obeys the server sends the request again, in seconds after the start of the load.

    None if the request was not refused, got no time to come back within `patience_s` seconds, or has been sent again
    `most_repeats` times.
    """
    retry_after_s = outcome.retry_after_s if outcome.is_refused else None
    if retry_after_s is None or retry_after_s > patience_s or outcome.num_refusals_before >= most_repeats:
        return None
    return outcome.ended_s + retry_after_s


def last_sendings(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the last outcome of each request. In `outcomes` those of one request follow each other."""
    return list({outcome.index: outcome for outcome in outcomes}.values())


def times_of(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that a timeline or a refusal has, by the names of KEPT; is_late is 1 or 0."""
    return {name: float(fields[name]) for name in KEPT if name in fields}


def bounded(text: str) -> str:
    """Return the beginning of a text, on one line of at most MAX_ERROR_CHARACTERS characters."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."


def pack_request(request: PlannedRequest) -> bytes:
    """Return the request as one line of JSON, with its newline. Token ids must be 0 to 2**32 - 1."""
    values = {each.name: getattr(request, each.name) for each in fields(request)}
    prompt = b64encode(array(TOKEN_TYPE, request.prompt).tobytes()).decode()  # numbers take longer
    return json.dumps({**values, "prompt": prompt}, separators=(",", ":")).encode() + b"\n"


def load_digest(conditions: object, planned: Iterable[PlannedRequest]) -> str:
    """Return a digest, as hex digits, of these requests and of the `repr` of the conditions that they are sent under:
    loads with one digest have one outcome, as far as the server's does not vary."""
    digest = hashlib.blake2s(repr(conditions).encode(), digest_size=DIGEST_BYTES)
    for each in planned:
        digest.update(pack_request(each))
    return digest.hexdigest()


def unpack_request(line: bytes) -> PlannedRequest:
    """Return the request that a line of `pack_request` has."""
    values, prompt = json.loads(line), array(TOKEN_TYPE)
    prompt.frombytes(b64decode(values["prompt"]))
    tuples = {name: tuple(values[name]) for name in ("after", "messages")}
    return PlannedRequest(**{**values, **tuples, "prompt": prompt})


def to_outcome(values: Mapping[str, Any]) -> Outcome:
    """Return the outcome with the fields of a JSON object."""
    arrivals = ("arrivals_s", "arrival_tokens")
    return Outcome(**{**values, **{name: tuple(values[name]) for name in arrivals}})
