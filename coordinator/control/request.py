"""The state of a request: its current attempt, its migration, and attempts that nodes have yet to release. Pure."""

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
from serving_core.due import Due
from serving_core.requests import Pooling, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class SoFar:
    """For a new answer it is NOTHING."""

    token_ids: tuple[int, ...] = ()
    num_chars: int = 0  # of the text
    finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED  # if the last token ends it
    since_first_s: float = 0.0
    has_ended: bool = False  # the client has its end too


NOTHING: Final = SoFar()


ONE_EVENT_S: Final = 5.0  # within which losses of nodes count as one
NUM_TOKENS_FURTHER: Final = 8  # more than a node that dies has written without a word


def tell_sender(reserve: fleet_pb2.Reserve, sender: Node) -> None:
    """Which node's ranks will send what blocks are reserved for."""
    reserve.prefill_tp_size, reserve.prefill_pp_size = sender.tp_size, sender.pp_size
    reserve.sender_keys.extend(sender.hello.kv_keys)


@dataclass(frozen=True, slots=True)
class Loan:
    """What the node that reads is to have from another one: the blocks of so many leading tokens, num_lent of which it
    does not hold. It is to wait for them for patience_s at most."""

    lender: Node
    num_tokens: int
    num_lent: int
    patience_s: float
    epoch: int = 0  # of the transfer, once there is an attempt

    def to_wire(self) -> fleet_pb2.Borrow:
        lender = self.lender
        return fleet_pb2.Borrow(
            epoch=self.epoch,
            num_tokens=self.num_tokens,
            tp_size=lender.tp_size,
            pp_size=lender.pp_size,
            sender_keys=lender.hello.kv_keys,
            patience_s=self.patience_s,
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at a request on one pair of nodes; `prefill` is `decode` where one node does both, or reads and nobody
    writes."""

    epoch: int
    prefill: Node
    decode: Node
    first_index: int  # of the token that the prefill node samples
    started_s: float
    loan: Loan | None = None  # until it is over
    hosts: Sequence[Node] = ()  # of a request that is longer than the pool: who may hold some of it
    granted_s: float | None = None  # when the decode node gave blocks
    revoked_s: float | None = None  # when it last took them back
    prefill_holds: bool = True  # whether the node may hold something of the attempt
    decode_holds: bool = True
    first_token_s: float | None = None
    is_lent: bool = False  # whether the lender was asked for the loan
    is_taken: bool = False  # whether the node that reads has said so, as it does of suspects
    is_committed: bool = False
    has_counted_kv: bool = False  # whether the decode node's own word for it, with the bytes, has come too
    # Tokens by index that cannot be emitted yet: the two nodes' streams may overtake each other.
    early: dict[int, fleet_pb2.SampledToken] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_local:  # the KV is where it belongs from the start
            self.granted_s, self.is_committed = self.started_s, True

    @property
    def is_local(self) -> bool:
        """Whether the node that writes reads the prompt itself."""
        return self.prefill is self.decode

    @property
    def is_reserved(self) -> bool:
        return self.granted_s is not None

    @property
    def has_first_token(self) -> bool:
        return self.first_token_s is not None

    @property
    def is_handed_over(self) -> bool:
        """Whether the answer needs the prefill node no more."""
        return self.has_first_token and self.is_committed and not self.is_local

    @property
    def waits_since_s(self) -> float | None:
        """Since when the prompt is read and all that misses is room on the decode node; None while that is not so."""
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
        """The node holds nothing of the attempt any more."""
        if node is self.prefill:
            self.prefill_holds = False
        if node is self.decode:
            self.decode_holds = False

    def holders(self) -> Iterator[Node]:
        """The nodes that may hold something of the attempt, each once."""
        if self.prefill_holds and not self.is_local:
            yield self.prefill
        if self.decode_holds:
            yield self.decode


class MoveStage(Enum):
    RESERVING = auto()  # the target was asked for blocks; the source knows nothing of it
    MOVING = auto()  # the source has the descriptor
    ABANDONED = auto()  # the target was told to drop what it has: once it has, the source is told to go on
    MOVED = auto()  # the target writes; some of what the source wrote before may still be on its way


@dataclass(slots=True, eq=False)
class Move:
    """A running answer on its way to another node. Until it is MOVED, the current attempt is the source's."""

    epoch: int  # of the attempt on the target
    source: Node
    source_epoch: int
    target: Node
    started_s: float
    is_whole: bool  # whatever the target holds of its blocks already
    stage: MoveStage = MoveStage.RESERVING
    next_index: int = 0  # of the first token that is the target's
    source_holds: bool = True
    has_resumed: bool = False  # whether a token of the target has come

    @property
    def is_under_way(self) -> bool:
        return self.stage in (MoveStage.RESERVING, MoveStage.MOVING)


class Death(NamedTuple):
    """A node may have died of a request, or failed, when that had so many tokens."""

    session: int | None  # of the node whose stream has ended; None of one that has failed, and said so
    num_tokens: int
    cause: str  # in words for the client


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One live answer."""

    request_id: str
    age: int  # its place in the order of admission, kept over attempts: nodes serve lower ones first
    prompt: Prompt
    sampling: SamplingParams
    deadline_s: float
    timeline: Timeline
    slo: Slo | None = None
    pooling: Pooling | None = None  # an embedding is wanted: no node writes anything
    asker: str = ""  # the name of the API key that came with it
    embedded_s: float | None = None  # when that came
    output: list[int] = field(default_factory=list)  # token ids emitted so far, over all attempts and calls
    num_resumed: int = 0  # of these, those that came with the call
    num_restarts: int = 0
    num_excused: int = 0  # of these, those that nobody is to blame for, and losses beside one that counts
    loss_s: float = -math.inf  # when the last loss of a node that counts was
    num_cached_tokens: int = 0  # of the prompt, on the node that gave the first token; later attempts read more
    num_kv_bytes: int = 0  # that travelled, over all attempts
    num_kv_bytes_saved: int = 0
    lent_kv_bytes: int = 0  # that other nodes lent, over all attempts; in none of these
    loan_s: float = 0.0  # that they took
    num_moves: int = 0
    num_moved_kv_bytes: int = 0  # of num_kv_bytes
    num_proposed: int = 0  # candidates that nodes have computed for it
    num_accepted: int = 0  # of these, the ones that came
    move_pause_s: float = 0.0  # from the last token before a move to the first one after it, over all moves
    move: Move | None = None
    moved_s: float | None = None  # when the last move was over, however it ended
    moves_whole: bool = False  # as its node has other blocks of its tokens than a target had
    deaths: list[Death] = field(default_factory=list)  # in a row, between which it has come no further
    avoid: list[Node] = field(default_factory=list)  # that have failed it: others are taken while there are any
    full_nodes: set[Node] = field(default_factory=set)  # of those, the ones that had no room for it
    asks_again_s: float = 0.0  # while it waits for nodes: not before this
    waits_until_s: float | None = None  # for nodes, by Pauses.awake_s; None while nodes have it
    has_turn: bool = False  # it was refused, and comes back when it was told to
    refuses_late: bool = False  # a node that has computed less than half of its prompt refuses it once it would be late
    is_late: bool = False  # its first token: it goes behind all others
    predicted_first_s: float | None = None  # when its first token was expected, in time; None: not at all
    expectation: Expectation | None = None  # when nodes were first given it, or it was refused; with limits alone
    held_since_s: float | None = None  # when it was first held; None: never
    is_held: bool = False  # before it is placed for the first time: coordinator/control/admission.py
    attempt: Attempt = field(init=False)  # the current one, or the last one while it waits for nodes after some

    @property
    def waits_for_nodes(self) -> bool:
        """Whether it waits for some to come."""
        return self.waits_until_s is not None

    @property
    def is_waiting(self) -> bool:
        """Whether no node has it: it waits for some to come, or is held."""
        return self.waits_for_nodes or self.is_held

    @property
    def known(self) -> Prompt:
        """What a node has to read to go on with the answer."""
        return self.prompt.followed_by(self.output)

    @property
    def num_tokens_left(self) -> int:
        """Of the answer, at most."""
        return self.sampling.max_tokens - len(self.output)

    @property
    def max_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def due(self) -> Due | None:
        """When its tokens are due; None without limits."""
        slo = self.slo
        if slo is None or not slo.has_limits:
            return None
        first_s = math.inf if slo.ttft_s is None else self.timeline.start_s + slo.ttft_s
        tpot_s = math.inf if slo.tpot_s is None else slo.tpot_s
        return Due(first_s, tpot_s, self.timeline.first_token_s, self.refuses_late and not self.output)

    @property
    def limits_first(self) -> bool:
        """Whether there is a limit on its first token."""
        return self.slo is not None and self.slo.ttft_s is not None

    @property
    def priority(self) -> int:
        """Its place among prompts that wait: the lower, the earlier."""
        return 0 if self.slo is None else self.slo.priority

    def resume(self, token_ids: Sequence[int]) -> None:
        """Goes on behind tokens that an earlier call has given; to be called before all else."""
        self.output += token_ids
        self.num_resumed = len(token_ids)

    def note_held(self, now: float) -> None:
        """It is held now, perhaps for the first time."""
        self.is_held = True
        if self.held_since_s is None:
            self.held_since_s = now

    def note_death(self, session: int | None, cause: str) -> None:
        """As Death says. What has come further since another one was no reason for that."""
        if self.deaths and len(self.output) > self.deaths[-1].num_tokens + NUM_TOKENS_FURTHER:
            self.deaths.clear()
        self.deaths.append(Death(session, len(self.output), cause))

    def note_loss(self, now: float) -> bool:
        """Its node is lost. Return whether that counts: what is lost soon after another node has the same cause, such
        as a host or a switch."""
        if now - self.loss_s < ONE_EVENT_S:
            return False
        self.loss_s = now
        return True

    def take_back_death(self, session: int) -> None:
        """The node of this session lives."""
        self.deaths = [death for death in self.deaths if death.session != session]

    @property
    def may_have_come(self) -> bool:
        """Whether the node that reads may have the prompt. Of a suspect it would have said so: nodes that die at the
        same time do not all die of a request that the coordinator gives from one to the other meanwhile."""
        return self.attempt.is_taken or not self.deaths

    def end_move(self, now: float) -> None:
        """Nothing is left to be heard of the move, however it ended."""
        self.move, self.moved_s = None, now

    def settle_move(self, now: float) -> None:
        """Ends it when the source holds nothing and the target has gone on."""
        if self.move is not None and self.move.has_resumed and not self.move.source_holds:
            self.end_move(now)

    def job(self, epoch: int, prompt: Prompt, now: float) -> fleet_pb2.Job:
        """What a node is to know of an attempt that begins with this prompt, told now."""
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
            due = Due(math.inf, due.tpot_s)  # nothing is to be hurried for it
        due_left = due_to_wire(due, now) if due else None
        return job_to_wire(request, self.age, due_left, self.priority, is_suspect=bool(self.deaths), asker=self.asker)

    def commands(self, prompt: Prompt, now: float) -> Iterator[tuple[Node, fleet_pb2.NodeCommand]]:
        """What the nodes of the current attempt, which reads this prompt, are to be told now."""
        attempt = self.attempt
        job = self.job(attempt.epoch, prompt, now)
        to_prefill = fleet_pb2.NodeCommand(attempt=job.attempt)
        if self.pooling is not None:
            to_prefill.prefill.job.CopyFrom(job)
            yield attempt.prefill, to_prefill
            return
        to_decode = fleet_pb2.NodeCommand(attempt=job.attempt)
        to_decode.reserve.job.CopyFrom(job)  # in its place: each copy is one of the whole prompt
        if attempt.is_local:
            to_decode.reserve.local_prefill = True
            self._offer(to_decode.reserve.job)
            to_decode.reserve.job.hosts.extend([node.hello.annexes.host for node in attempt.hosts])
            yield attempt.decode, to_decode
            return
        tell_sender(to_decode.reserve, attempt.prefill)
        yield attempt.decode, to_decode
        to_prefill.prefill.job.CopyFrom(job)
        self._offer(to_prefill.prefill.job)
        yield attempt.prefill, to_prefill

    def _offer(self, job: fleet_pb2.Job) -> None:
        if self.attempt.loan is not None:
            job.borrow.CopyFrom(self.attempt.loan.to_wire())

    def count_kv(self, event: fleet_pb2.Committed) -> bool:
        """Adds what the current attempt's transfer has moved and saved. False for a repeated report, which changes
        nothing."""
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
    """Remembers each Cancel until the node has answered it or is lost, and asks again every RESEND_S seconds."""

    def __init__(self) -> None:
        self._releases: dict[tuple[Node, int], _Release] = {}  # epochs are never used twice

    def __len__(self) -> int:
        return len(self._releases)

    def ask(self, node: Node, request_id: str, epoch: int, now: float) -> fleet_pb2.NodeCommand:
        """The Cancel to send to the node."""
        release = _Release(node, fleet_pb2.Attempt(request_id=request_id, epoch=epoch), now)
        self._releases[node, epoch] = release
        return _cancel(release)

    def settle(self, node: Node, epoch: int) -> bool:
        """The node holds nothing of the attempt any more. False when it was not asked to let go."""
        return self._releases.pop((node, epoch), None) is not None

    def count(self, node: Node) -> int:
        """Attempts that the node has yet to let go of."""
        return sum(release.node is node for release in self._releases.values())

    def lose(self, node: Node) -> None:
        self._releases = {key: release for key, release in self._releases.items() if release.node is not node}

    def overdue(self, now: float) -> list[tuple[Node, fleet_pb2.NodeCommand]]:
        """The Cancels to send again."""
        late = [release for release in self._releases.values() if now - release.asked_s >= RESEND_S]
        for release in late:
            release.asked_s = now
        return [(release.node, _cancel(release)) for release in late]


def _cancel(release: _Release) -> fleet_pb2.NodeCommand:
    return fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel(attempt=release.attempt), attempt=release.attempt)


# As many nodes as may die in a row of a request that comes no further.
MAX_DEATHS: Final = 2


def at_work(node: Node, requests: Iterable[TrackedRequest]) -> Iterator[TrackedRequest]:
    """Those that the node's last step may have been about, of requests in order of age: all answers that it wrote, and
    the oldest of its prompts, as many as a step holds beside the rest of the first."""
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
