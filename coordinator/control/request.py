"""Keep the state of a request: its current attempt, its migration, and the attempts that nodes have yet to release.
Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from coordinator.control.load import Prompt
from coordinator.control.nodes import Node
from coordinator.control.slo import Expectation, Slo
from coordinator.control.timeline import Phase, Timeline
from protos import fleet_pb2, inference_pb2
from protos.convert import due_to_wire, job_to_wire
from serving_core.requests import Pooling, Request, SamplingParams
from serving_core.slo import Due


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


def tell_sender(reserve: fleet_pb2.Reserve, sender: Node) -> None:
    """Add the tensor-parallel size, the pipeline-parallel size and the KV keys of the sending node to a Reserve."""
    reserve.prefill_tp_size, reserve.prefill_pp_size = sender.tp_size, sender.pp_size
    reserve.sender_keys.extend(sender.hello.kv_keys)


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
    hosts: Sequence[Node] = ()  # KV holders of a request that is longer than the pool
    granted_s: float | None = None  # when the decode node gave credit
    revoked_s: float | None = None  # when the decode node last revoked the credit
    prefill_holds: bool = True  # whether the prefill node may hold something of the attempt
    decode_holds: bool = True
    first_token_s: float | None = None
    is_lent: bool = False  # whether the source of the remote prefix fetch was asked
    is_taken: bool = False  # whether the prefill node has reported Taken, as it does of poison requests
    is_committed: bool = False
    has_counted_kv: bool = False  # whether the decode node has reported the bytes
    # Tokens by index that cannot be emitted yet: the streams of two nodes may overtake each other.
    early: dict[int, fleet_pb2.SampledToken] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_local:  # no KV transfer is needed
            self.granted_s, self.is_committed = self.started_s, True

    @property
    def is_local(self) -> bool:
        """Return whether the decode node prefills the prompt itself."""
        return self.prefill is self.decode

    @property
    def is_reserved(self) -> bool:
        return self.granted_s is not None

    @property
    def has_first_token(self) -> bool:
        return self.first_token_s is not None

    @property
    def is_handed_over(self) -> bool:
        """Return whether the request needs its prefill node no more: the KV transfer is complete."""
        return self.has_first_token and self.is_committed and not self.is_local

    @property
    def waits_since_s(self) -> float | None:
        """Return when the wait for blocks of the decode node began; None unless the prompt is prefilled and only blocks
        lack."""
        if self.first_token_s is None or self.is_committed or self.is_reserved:
            return None
        return max(self.first_token_s, self.revoked_s or self.first_token_s)

    @property
    def phase_after_prefill(self) -> Phase:
        if self.early:
            return Phase.DECODE
        if self.is_committed:
            return Phase.DECODE_QUEUE
        return Phase.TRANSFER if self.is_reserved else Phase.CREDIT_WAIT

    def let_go(self, node: Node) -> None:
        """Note that a node holds nothing of the attempt any more."""
        if node is self.prefill:
            self.prefill_holds = False
        if node is self.decode:
            self.decode_holds = False

    def holders(self) -> Iterator[Node]:
        """Yield the nodes that may hold something of the attempt, each once."""
        if self.prefill_holds and not self.is_local:
            yield self.prefill
        if self.decode_holds:
            yield self.decode


class MigrationStage(Enum):
    """The stage of a migration, as the coordinator knows it."""

    RESERVING = auto()  # the target was asked for blocks; the source knows nothing
    MOVING = auto()  # the source has the transfer descriptor
    ABANDONED = auto()  # the target was told to drop its part: then the source gets Keep
    MIGRATED = auto()  # the target decodes; tokens of the source may still be on their way


@dataclass(slots=True, eq=False)
class Migration:
    """Keep the state of a migration; until `stage` is MOVED, the current attempt is the source's."""

    epoch: int  # epoch of the attempt on the target
    source: Node
    source_epoch: int
    target: Node
    started_s: float
    is_whole: bool  # all blocks travel, also those that the target has cached
    stage: MigrationStage = MigrationStage.RESERVING
    next_index: int = 0  # index of the target's first token
    source_holds: bool = True
    has_resumed: bool = False  # whether the target has sent a token

    @property
    def is_under_way(self) -> bool:
        return self.stage in (MigrationStage.RESERVING, MigrationStage.MOVING)


class Death(NamedTuple):
    """Record that a node died or failed while it may have computed a request, which had `num_tokens` tokens then."""

    session: int | None  # of the node whose stream ended; None for a node that reported its failure
    num_tokens: int
    cause: str  # worded for the client


@dataclass(slots=True, eq=False)
class TrackedRequest:
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
    embedded_s: float | None = None  # when the embedding came
    output: list[int] = field(default_factory=list)  # token ids emitted, over all attempts and calls
    num_resumed: int = 0  # tokens of the output that an earlier call has returned
    num_restarts: int = 0
    num_excused: int = 0  # restarts that do not count against max_restarts
    loss_s: float = -math.inf  # when the last loss of a node that counts happened
    num_cached_tokens: int = 0  # of the prompt, on the node that sampled the first token
    num_kv_bytes: int = 0  # transferred, over all attempts
    num_kv_bytes_saved: int = 0
    lent_kv_bytes: int = 0  # by remote prefix fetches, over all attempts; not in num_kv_bytes
    loan_s: float = 0.0  # seconds that the remote prefix fetches took
    num_moves: int = 0
    num_migrated_kv_bytes: int = 0  # those of num_kv_bytes that migrations transferred
    num_proposed: int = 0  # draft tokens that nodes have verified
    num_accepted: int = 0  # draft tokens accepted
    move_pause_s: float = 0.0  # from the last token before a migration to the first one after, summed over all
    migration: Migration | None = None
    migrated_s: float | None = None  # when the last migration ended, whatever its outcome
    migrations_whole: bool = False  # its node's blocks have another numerics id than a target's
    deaths: list[Death] = field(default_factory=list)  # in a row, without progress of the request between them
    avoid: list[Node] = field(default_factory=list)  # nodes that have failed the request, chosen last
    full_nodes: set[Node] = field(default_factory=set)  # those of `avoid` that had no room
    asks_again_s: float = 0.0  # earliest next placement while the request waits for nodes
    waits_until_s: float | None = None  # by Pauses.awake_s; None while nodes have the request
    has_turn: bool = False  # the request was refused before and returns at its retry-after time
    refuses_late: bool = False  # nodes refuse it once it would be late, unless half of its prompt is computed
    is_late: bool = False  # its first token is late: it goes after all other requests
    predicted_first_s: float | None = None  # predicted time of the first token; None unless it is in time
    expectation: Expectation | None = None  # set at the first placement or the refusal; only with an SLO
    held_since_s: float | None = None  # when the request was first deferred; None: never
    is_held: bool = False  # deferred (coordinator/control/admission.py)
    attempt: Attempt = field(init=False)  # the current attempt, or the last one while the request waits for nodes

    @property
    def waits_for_nodes(self) -> bool:
        """Return whether the request waits for nodes to attach."""
        return self.waits_until_s is not None

    @property
    def is_waiting(self) -> bool:
        """Return whether no node has the request: it waits for nodes to attach, or is deferred."""
        return self.waits_for_nodes or self.is_held

    @property
    def known(self) -> Prompt:
        """Return the prompt of the next attempt: the request's own prompt followed by the tokens emitted."""
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
        """Return the priority among waiting prompts: a lower value goes first."""
        return 0 if self.slo is None else self.slo.priority

    def resume(self, token_ids: Sequence[int]) -> None:
        """Continue behind the tokens that an earlier call has returned. Must be called before any other method."""
        self.output += token_ids
        self.num_resumed = len(token_ids)

    def note_held(self, now: float) -> None:
        """Note that the request is deferred from `now`; the first call also sets `held_since_s`."""
        self.is_held = True
        if self.held_since_s is None:
            self.held_since_s = now

    def note_death(self, session: int | None, cause: str) -> None:
        """Note that a node died or failed while it may have computed the request.

        Earlier deaths are forgotten where the request has gained more than NUM_TOKENS_FURTHER tokens since the last
        one: it was not their cause. `session` is None for a node that failed and reported so; `cause` is worded for the
        client.
        """
        if self.deaths and len(self.output) > self.deaths[-1].num_tokens + NUM_TOKENS_FURTHER:
            self.deaths.clear()
        self.deaths.append(Death(session, len(self.output), cause))

    def note_loss(self, now: float) -> bool:
        """Note that a node of the request is lost. Return whether the loss counts against the restarts.

        A loss within ONE_EVENT_S of the one before does not count: both have the same cause, such as a host or a
        switch.
        """
        if now - self.loss_s < ONE_EVENT_S:
            return False
        self.loss_s = now
        return True

    def take_back_death(self, session: int) -> None:
        """Forget the death of the node of this session, which has turned out to be alive."""
        self.deaths = [death for death in self.deaths if death.session != session]

    @property
    def may_have_come(self) -> bool:
        """Return whether the prefill node may have received the prompt.

        A node that receives a poison request reports so first (Taken). Without the report, a node that dies does not
        count against the request: several nodes may die at one time while the coordinator passes the request from one
        to the next.
        """
        return self.attempt.is_taken or not self.deaths

    def end_migration(self, now: float) -> None:
        """End the migration, whatever its outcome: no node will report about it again."""
        self.migration, self.migrated_s = None, now

    def settle_migration(self, now: float) -> None:
        """End the migration once the source holds nothing and the target has sent a token."""
        if self.migration is not None and self.migration.has_resumed and not self.migration.source_holds:
            self.end_migration(now)

    def job(self, epoch: int, prompt: Prompt, now: float) -> fleet_pb2.Job:
        """Return the Job that describes an attempt with this prompt to a node. Deadlines count from `now`, in
        seconds."""
        request = Request(
            request_id=self.request_id,
            epoch=epoch,
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
            pooling=self.pooling,
        )
        due = self.due
        if self.is_late and due is not None and now > due.first_s and not self.output:
            due = Due(math.inf, due.tpot_s)  # the first token is late: nodes need not hurry
        due_left = due_to_wire(due, now) if due else None
        return job_to_wire(request, self.age, due_left, self.priority, is_suspect=bool(self.deaths), asker=self.asker)

    def commands(self, prompt: Prompt, now: float) -> Iterator[tuple[Node, fleet_pb2.NodeCommand]]:
        """Yield the commands that start the current attempt, each with its node. `prompt` is the attempt's whole
        prompt."""
        attempt = self.attempt
        job = self.job(attempt.epoch, prompt, now)
        to_prefill = fleet_pb2.NodeCommand(attempt=job.attempt)
        if self.pooling is not None:
            to_prefill.prefill.job.CopyFrom(job)
            yield attempt.prefill, to_prefill
            return
        to_decode = fleet_pb2.NodeCommand(attempt=job.attempt)
        to_decode.reserve.job.CopyFrom(job)  # filled in place: each copy copies the whole prompt
        if attempt.is_local:
            to_decode.reserve.local_prefill = True
            self._offer(to_decode.reserve.job)
            to_decode.reserve.job.hosts.extend([node.hello.remote_kvs.host for node in attempt.hosts])
            yield attempt.decode, to_decode
            return
        tell_sender(to_decode.reserve, attempt.prefill)
        yield attempt.decode, to_decode
        to_prefill.prefill.job.CopyFrom(job)
        self._offer(to_prefill.prefill.job)
        yield attempt.prefill, to_prefill

    def _offer(self, job: fleet_pb2.Job) -> None:
        if self.attempt.prefix_fetch is not None:
            job.fetch_prefix.CopyFrom(self.attempt.prefix_fetch.to_wire())

    def count_kv(self, event: fleet_pb2.Committed) -> bool:
        """Add the bytes that the current attempt's KV transfer has moved and saved.

        Return False for a repeated report, which changes nothing.
        """
        if self.attempt.has_counted_kv:
            return False
        self.attempt.has_counted_kv = True
        self.num_kv_bytes += event.num_bytes
        self.num_kv_bytes_saved += event.num_bytes_saved
        return True


RESEND_S = 5.0


@dataclass(slots=True)
class _Release:
    node: Node
    attempt: fleet_pb2.Attempt
    asked_s: float


class Releases:
    """Keep each Cancel until the node has confirmed it or is lost, and repeat it every RESEND_S seconds."""

    def __init__(self) -> None:
        self._releases: dict[tuple[Node, int], _Release] = {}  # epochs are never used twice

    def __len__(self) -> int:
        return len(self._releases)

    def ask(self, node: Node, request_id: str, epoch: int, now: float) -> fleet_pb2.NodeCommand:
        """Return the Cancel to send to the node."""
        release = _Release(node, fleet_pb2.Attempt(request_id=request_id, epoch=epoch), now)
        self._releases[node, epoch] = release
        return _cancel(release)

    def settle(self, node: Node, epoch: int) -> bool:
        """Note that the node has released the attempt. Return False where no Cancel was sent for the attempt."""
        return self._releases.pop((node, epoch), None) is not None

    def count(self, node: Node) -> int:
        """Return the number of attempts that the node has yet to release."""
        return sum(release.node is node for release in self._releases.values())

    def lose(self, node: Node) -> None:
        self._releases = {key: release for key, release in self._releases.items() if release.node is not node}

    def overdue(self, now: float) -> list[tuple[Node, fleet_pb2.NodeCommand]]:
        """Return the Cancels to send again, each with its node."""
        late = [release for release in self._releases.values() if now - release.asked_s >= RESEND_S]
        for release in late:
            release.asked_s = now
        return [(release.node, _cancel(release)) for release in late]


def _cancel(release: _Release) -> fleet_pb2.NodeCommand:
    return fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel(attempt=release.attempt), attempt=release.attempt)


# Deaths of nodes in a row, without progress of the request, after which it is quarantined as a poison request.
MAX_DEATHS: Final = 2


def at_work(node: Node, requests: Iterable[TrackedRequest]) -> Iterator[TrackedRequest]:
    """Yield the requests that the last step of a node may have computed.

    `requests` are in order of age. The result has all sequences that the node was decoding, and its oldest prompts, as
    many as one step holds beside the rest of the first.
    """
    num_ahead, most = 0, node.shape.prompt_tokens or node.hello.max_num_batched_tokens
    has_prompt = False
    for request in requests:
        attempt = request.attempt
        if attempt.has_first_token:
            if node is attempt.decode and attempt.is_committed:
                yield request
        elif node is attempt.prefill and num_ahead < most:
            if request.may_have_come:
                yield request
            num_ahead += len(request.prompt) + len(request.output) if has_prompt else 0
            has_prompt = True
