"""Define the coordinator's request: one sequence from its arrival to its one end, and its attempts. Pure.

A request is in one State. Its data of one state exist in that state alone: an Attempt while nodes have the request, a
Wait while it waits for nodes, a Migration in the four states of migrations. The transitions, and the events that cause
them, are a table in coordinator/control/scheduler.py. A Timeline records the phases for clients, logs and metrics;
nothing is decided by it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from itertools import pairwise
from typing import Any, Final, NamedTuple

from coordinator.control.load import Prompt
from coordinator.control.nodes import Node
from coordinator.control.slo import Expectation, Slo
from protos import fleet_pb2, inference_pb2
from serving_core.requests import Pooling, SamplingParams
from serving_core.slo import Due


class State(IntEnum):
    """The states of a request, in the order of its way."""

    QUEUED = auto()  # no node has it: it is new, or admission control defers it
    WAITING_FOR_NODES = auto()  # no node can take it now
    PREFILLING = auto()  # its nodes have it; this attempt has no token yet
    WAITING_FOR_BLOCKS = auto()  # it has its first token, and the decode node has no blocks for it
    TRANSFERRING = auto()  # the decode node has reserved blocks, and lacks KV
    DECODE_QUEUED = auto()  # the decode node has the KV, and has sent no token
    DECODING = auto()
    RESERVING_TARGET = auto()  # it decodes; the target of its migration has no blocks for it yet
    MIGRATING = auto()  # it decodes; the source of the migration sends KV to the target
    ABORTING_MIGRATION = auto()  # the target drops its part, and then the source decodes on
    MIGRATED = auto()  # the target decodes; the source's last tokens or its release, or the target's first, are to come
    FINISHED = auto()


ON_NODES: Final = frozenset(State) - {State.QUEUED, State.WAITING_FOR_NODES, State.FINISHED}
IN_MIGRATION: Final = frozenset((State.RESERVING_TARGET, State.MIGRATING, State.ABORTING_MIGRATION, State.MIGRATED))


class Transition(NamedTuple):
    """What an event does in some states: its handler, and the state that may follow.

    A handler takes the request, the node, the event and the time, and returns instructions.
    """

    states: Iterable[State]
    event: str
    handler: Callable[..., Any]
    then: Iterable[State] = ()  # beside the state itself


MAX_MARKS: Final = 64  # per timeline: about twenty restarts or migrations


class Phase(Enum):
    """The phase of a request; the values are the fields of the Timeline message, less their _s.

    Where one node does both prefill and decode, there is neither KV_ALLOC nor KV_TRANSFER: the wait for blocks is part
    of PREFILL_QUEUE.
    """

    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    KV_ALLOC = "kv_alloc"
    KV_TRANSFER = "kv_transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"


class Mark(NamedTuple):
    """The start of a phase: from here on the request is in it, on this prefill node and this decode node."""

    at_s: float
    phase: Phase
    prefill_node: str = ""
    decode_node: str = ""
    attempt: int = 0  # number of the attempt, from 1; the last one's while no node has the request


class Timeline:
    """Record the phases of a request.

    A request is in exactly one phase at any time, so the phases add up to its whole time. The seconds of a phase that
    is entered again, after a migration or a restart, add up too.
    """

    def __init__(self, start_s: float, first_token_s: float | None = None) -> None:
        """Create a timeline that is in PREFILL_QUEUE since `start_s`.

        `first_token_s` is set for an output whose first token an earlier call has returned.
        """
        self.phase = Phase.PREFILL_QUEUE
        self._start_s = self._entered_s = start_s
        self._first_token_s = first_token_s
        self.last_token_s = start_s
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._marks = [Mark(start_s, self.phase)]
        self._num_attempts = 0
        self.failures: dict[int, str] = {}  # reasons of failed attempts, by number

    def enter(self, phase: Phase, now: float, *, ago_s: float = 0.0) -> None:
        """End the current phase and start another one, `ago_s` seconds before `now`.

        The other phase never begins before the current one began.
        """
        at_s = max(self._entered_s, min(now, now - ago_s))
        self._seconds[self.phase] += at_s - self._entered_s
        self.phase, self._entered_s = phase, at_s
        self._mark(self._marks[-1]._replace(at_s=at_s, phase=phase))

    def placed(self, now: float, prefill_node: str = "", decode_node: str = "", *, begins: bool = False) -> None:
        """Record the nodes that have the request from `now` on; empty names for none. `begins` counts a new attempt."""
        self._num_attempts += begins
        self._mark(Mark(now, self.phase, prefill_node, decode_node, self._num_attempts))

    def failed(self, reason: str) -> None:
        """Record why the last attempt failed."""
        if len(self.failures) < MAX_MARKS:
            self.failures[self._num_attempts] = reason

    def _mark(self, mark: Mark) -> None:
        last = self._marks[-1]
        if mark[1:] == last[1:]:
            return
        if mark.at_s <= last.at_s:
            mark = mark._replace(at_s=last.at_s)
            self._marks.pop()
        elif len(self._marks) >= MAX_MARKS:
            self._marks.pop()  # the span before is extended
        self._marks.append(mark)

    def spans(self, now: float) -> Iterator[tuple[Mark, float]]:
        """Yield the spans until `now`, in order, as the mark of the start and the time of the end.

        A span ends where the phase, a node or the attempt changes. Empty ones are left out.
        """
        for mark, following in pairwise([*self._marks, Mark(now, self.phase)]):
            if following.at_s > mark.at_s:
                yield mark, following.at_s

    @property
    def start_s(self) -> float:
        return self._start_s

    @property
    def first_token_s(self) -> float | None:
        """Return the time at which the first token came; None before."""
        return self._first_token_s

    @property
    def ttft_s(self) -> float:
        """Return the TTFT in seconds; 0 before the first token, and where an earlier call has returned it."""
        return 0.0 if self._first_token_s is None else max(0.0, self._first_token_s - self._start_s)

    def tpot_s(self, num_tokens: int) -> float:
        """Return the mean seconds per token after the first, for `num_tokens` tokens; 0 with fewer than two."""
        first_s = self._first_token_s
        return (self.last_token_s - first_s) / (num_tokens - 1) if first_s is not None and num_tokens > 1 else 0.0

    def tokens(self, now: float) -> float:
        """Record that tokens came at `now`, and return the seconds since the tokens before, or since the start."""
        if self._first_token_s is None:
            self._first_token_s = now
        gap_s, self.last_token_s = now - self.last_token_s, now
        return gap_s

    def to_wire(self, now: float, **others: Any) -> inference_pb2.Timeline:
        """Return the Timeline message of a request that ends at `now`; `others` are its fields beside the times.

        Ends the current phase at `now`.
        """
        self.enter(self.phase, now)
        seconds: dict[str, Any] = {f"{phase.value}_s": spent_s for phase, spent_s in self._seconds.items()}
        return inference_pb2.Timeline(
            **seconds,
            e2e_s=sum(self._seconds.values()),
            ttft_s=self.ttft_s,
            **others,
        )


PHASES: Final = {
    State.QUEUED: Phase.PREFILL_QUEUE,
    State.WAITING_FOR_NODES: Phase.PREFILL_QUEUE,
    State.PREFILLING: Phase.PREFILL_QUEUE,  # how long the prefill took is known when it is over
    State.WAITING_FOR_BLOCKS: Phase.KV_ALLOC,
    State.TRANSFERRING: Phase.KV_TRANSFER,
    State.DECODE_QUEUED: Phase.DECODE_QUEUE,
    State.DECODING: Phase.DECODE,
    **dict.fromkeys(IN_MIGRATION, Phase.DECODE),
}


@dataclass(frozen=True, slots=True)
class SoFar:
    """Describe how much of an output an earlier call has returned; NOTHING for a new request."""

    token_ids: tuple[int, ...] = ()
    num_chars: int = 0  # characters of the text
    finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED  # set if the last token ends it
    since_first_s: float = 0.0
    has_ended: bool = False  # whether the client has the end too


NOTHING: Final = SoFar()


ONE_EVENT_S: Final = 5.0  # losses of nodes within this time count as one
NUM_TOKENS_FURTHER: Final = 8  # more tokens than a dying node leaves unreported


@dataclass(frozen=True, slots=True)
class PrefixFetch:
    """Describe a remote prefix fetch: `source` sends the blocks of the first `num_tokens` tokens to the prefill node.

    The prefill node lacks `num_fetched` of these tokens. It waits at most `patience_s` seconds and computes the tokens
    that have not arrived by then.
    """

    source: Node
    num_tokens: int
    num_fetched: int
    patience_s: float
    epoch: int = 0  # of the fetch's KV transfer, set with the attempt
    has_begun: bool = False  # whether the source has been sent SendPrefix

    def to_wire(self) -> fleet_pb2.FetchPrefix:
        source = self.source
        return fleet_pb2.FetchPrefix(
            epoch=self.epoch,
            num_tokens=self.num_tokens,
            tp_size=source.tp_size,
            pp_size=source.pp_size,
            sender_keys=source.hello.kv_keys,
            patience_s=self.patience_s,
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """Keep the state of one try at a request on a prefill node and a decode node.

    `prefill` is `decode` where one node does both, and where the request is for an embedding.
    """

    epoch: int
    prefill: Node
    decode: Node
    first_index: int  # index of the token that the prefill node samples
    started_s: float
    prefix_fetch: PrefixFetch | None = None  # remote prefix fetch, until its end
    kv_holders: Sequence[Node] = ()  # of a request that is longer than the pool
    holders: list[Node] = field(init=False)  # nodes that may hold something of the attempt, the prefill node first
    is_taken: bool = False  # whether the prefill node has reported Taken, as it does of poison requests
    reserved_s: float | None = None  # when the decode node reserved blocks; None while it has none for the request
    has_kv: bool = False  # whether the decode node has all KV
    has_counted_kv: bool = False  # whether the decode node has reported the bytes
    first_token_s: float | None = None
    # Tokens by index that cannot be emitted yet: the streams of two nodes may overtake each other.
    early: dict[int, fleet_pb2.SampledToken] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.holders = [self.decode] if self.is_local else [self.prefill, self.decode]
        if self.is_local:  # no KV transfer is needed
            self.reserved_s, self.has_kv = self.started_s, True

    @property
    def is_local(self) -> bool:
        """Return whether the decode node prefills the prompt itself."""
        return self.prefill is self.decode

    @property
    def state_after_prefill(self) -> State:
        """Return the state that follows PREFILLING, by what the decode node has reported already."""
        if self.early:
            return State.DECODING
        if self.has_kv:
            return State.DECODE_QUEUED
        return State.WAITING_FOR_BLOCKS if self.reserved_s is None else State.TRANSFERRING

    def released(self, node: Node) -> None:
        """Remove a node from `holders`, since it holds nothing of the attempt any more."""
        self.holders = [each for each in self.holders if each is not node]


class Wait(NamedTuple):
    """The limits of a wait for nodes."""

    until_s: float  # by Pauses.awake_s
    retry_s: float = -math.inf  # when placement is tried again at the earliest


@dataclass(slots=True, eq=False)
class Migration:
    """Keep what is known of a migration beside its state. Until MIGRATED, the current attempt is the source's."""

    epoch: int  # epoch of the attempt on the target
    source: Node
    source_epoch: int
    target: Node
    started_s: float
    is_whole: bool  # all blocks travel, also those that the target has cached
    next_index: int = 0  # index of the target's first token
    is_source_released: bool = False
    has_resumed: bool = False  # whether the target has sent a token


class Death(NamedTuple):
    """Record that a node died or failed while it may have computed a request, which had `num_tokens` tokens then."""

    session: int | None  # of the node whose stream ended; None for a node that reported its failure
    num_tokens: int
    cause: str  # worded for the client


@dataclass(slots=True, eq=False)
class Request:
    """Keep the state of one request (one sequence) that has not ended."""

    request_id: str
    age: int  # place in the order of admission, kept over attempts: nodes serve a lower age first
    prompt: Prompt
    sampling: SamplingParams
    deadline_s: float
    timeline: Timeline
    slo: Slo | None = None
    pooling: Pooling | None = None  # set where an embedding is wanted: no node decodes
    asker: str = ""  # name of the API key
    # The state, and the data of that state: set by `enter` and by the handlers of the scheduler's table.
    state: State = State.QUEUED
    entered_s: float = 0.0  # when the state was entered
    attempt: Attempt = field(init=False)  # exists in the states ON_NODES
    epochs: list[int] = field(default_factory=list)  # of all attempts
    wait: Wait = field(init=False)  # exists while WAITING_FOR_NODES
    migration: Migration | None = None  # exists IN_MIGRATION
    # The output.
    output: list[int] = field(default_factory=list)  # token ids emitted, over all attempts and calls
    num_resumed: int = 0  # tokens of the output that an earlier call has returned
    embedded_s: float | None = None  # when the embedding came
    # Failures.
    num_restarts: int = 0
    num_excused: int = 0  # restarts that do not count against max_restarts
    loss_s: float = -math.inf  # when the last loss of a node that counts happened
    deaths: list[Death] = field(default_factory=list)  # in a row, without progress of the request between them
    avoid: list[Node] = field(default_factory=list)  # nodes that have failed the request, chosen last
    full_nodes: set[Node] = field(default_factory=set)  # those of `avoid` that had no room
    migrated_s: float | None = None  # when the last migration ended, whatever its outcome
    migrates_whole: bool = False  # its node's blocks have another numerics id than a target's
    # Admission and predictions.
    came_back: bool = False  # the request was refused before and returns at its retry-after time
    refuses_late: bool = False  # nodes refuse it once it would be late, unless half of its prompt is computed
    is_late: bool = False  # its first token is late: it goes after all other requests
    deferred_since_s: float | None = None  # when the request was first deferred; None: never
    predicted_first_s: float | None = None  # predicted time of the first token; None unless it is in time
    expectation: Expectation | None = None  # set at the first placement or the refusal; only with an SLO
    # Counts for the end.
    num_cached_tokens: int = 0  # of the prompt, on the node that sampled the first token
    num_kv_bytes: int = 0  # transferred, over all attempts
    num_kv_bytes_saved: int = 0
    num_fetched_kv_bytes: int = 0  # by remote prefix fetches, over all attempts; not in num_kv_bytes
    prefix_fetch_s: float = 0.0  # seconds that the remote prefix fetches took
    num_migrations: int = 0
    num_migrated_kv_bytes: int = 0  # those of num_kv_bytes that migrations transferred
    num_proposed: int = 0  # draft tokens that nodes have verified
    num_accepted: int = 0  # draft tokens accepted
    migration_pause_s: float = 0.0  # from the last token before a migration to the first one after, over all

    def enter(self, state: State, now: float, *, ago_s: float = 0.0) -> None:
        """Enter a state and, if its phase is another one, enter that in the timeline as of `ago_s` before `now`."""
        if self.state is State.WAITING_FOR_NODES:
            del self.wait
        self.state, self.entered_s = state, now
        if state in PHASES and PHASES[state] is not self.timeline.phase:
            self.timeline.enter(PHASES[state], now, ago_s=ago_s)

    @property
    def is_on_nodes(self) -> bool:
        """Return whether nodes have the request."""
        return State.PREFILLING <= self.state < State.FINISHED

    @property
    def waits_for_kv(self) -> bool:
        """Return whether the prompt is prefilled, and the decode node lacks the KV."""
        return self.state in (State.WAITING_FOR_BLOCKS, State.TRANSFERRING)

    @property
    def has_kv_on_decode_node(self) -> bool:
        """Return whether the prompt is prefilled, and the decode node has the KV."""
        return State.DECODE_QUEUED <= self.state < State.FINISHED

    @property
    def may_restart_unseen(self) -> bool:
        """Return whether the attempt may restart elsewhere at no loss: it has no token yet, and no KV has traveled."""
        attempt = self.attempt
        return self.state is State.PREFILLING and not attempt.early and (attempt.is_local or not attempt.has_kv)

    @property
    def known(self) -> Prompt:
        """Return the prompt of the next attempt: the request's own prompt followed by the emitted output tokens."""
        return self.prompt.followed_by(self.output)

    @property
    def num_tokens_left(self) -> int:
        """Return the most output tokens that the request may still get."""
        return self.sampling.max_tokens - len(self.output)

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of prompt and output together."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def due(self) -> Due | None:
        """Return the deadlines of the request's tokens; None without an SLO on TTFT or TPOT."""
        slo = self.slo
        if slo is None or not slo.has_limits:
            return None
        first_s = math.inf if slo.ttft_s is None else self.timeline.start_s + slo.ttft_s
        tpot_s = math.inf if slo.tpot_s is None else slo.tpot_s
        return Due(first_s, tpot_s, self.timeline.first_token_s, self.refuses_late and not self.output)

    @property
    def limits_first(self) -> bool:
        """Return whether the request has an SLO on TTFT."""
        return self.slo is not None and self.slo.ttft_s is not None

    @property
    def priority(self) -> int:
        """Return the priority among waiting prompts: a lower value goes first; 0 without an SLO."""
        return 0 if self.slo is None else self.slo.priority

    def resume(self, token_ids: Sequence[int]) -> None:
        """Begin the output with the tokens that an earlier call has returned.

        Must be called before any other method.
        """
        self.output += token_ids
        self.num_resumed = len(token_ids)

    def note_death(self, session: int | None, cause: str) -> None:
        """Record that a node died or failed while it may have computed the request.

        Earlier deaths are forgotten where the request has gained more than NUM_TOKENS_FURTHER tokens since the last
        one: it was not their cause. `session` is None for a node that failed and reported so; `cause` is worded for the
        client.
        """
        if self.deaths and len(self.output) > self.deaths[-1].num_tokens + NUM_TOKENS_FURTHER:
            self.deaths.clear()
        self.deaths.append(Death(session, len(self.output), cause))

    def note_loss(self, now: float) -> bool:
        """Record that a node of the request is lost, and return whether the loss counts against the restarts.

        A loss within ONE_EVENT_S of the one before does not count: both have the same cause, such as a host or a
        switch.
        """
        if now - self.loss_s < ONE_EVENT_S:
            return False
        self.loss_s = now
        return True

    def take_back_death(self, session: int) -> None:
        """Forget the death of the node of this session, whose process has turned out to be alive."""
        self.deaths = [death for death in self.deaths if death.session != session]

    @property
    def may_have_come(self) -> bool:
        """Return whether the prefill node of the current attempt may have received the prompt, given that it was sent.

        True for a request without deaths. For one with deaths only once the node has reported Taken, which it does
        first: until then a node that dies does not count against the request, since several nodes may die at one time
        while the coordinator passes the request from one to the next.
        """
        return self.attempt.is_taken or not self.deaths


# Deaths of nodes in a row, without progress of the request, after which it is quarantined as a poison request.
MAX_DEATHS: Final = 2


def at_work(node: Node, requests: Iterable[Request]) -> Iterator[Request]:
    """Yield the requests that the last step of a node may have computed.

    `requests` are in order of age. These are all sequences that the node was decoding, and its oldest prompts, as many
    as one step holds beside the rest of the first.
    """
    num_ahead, most = 0, node.shape.prompt_tokens or node.hello.max_num_batched_tokens
    has_prompt = False
    for request in requests:
        attempt = request.attempt
        if request.has_kv_on_decode_node:
            if node is attempt.decode:
                yield request
        elif request.state is State.PREFILLING and node is attempt.prefill and num_ahead < most:
            if request.may_have_come:
                yield request
            num_ahead += len(request.prompt) + len(request.output) if has_prompt else 0
            has_prompt = True
