"""Which requests hold blocks, and which tokens the next step computes. No I/O, no clock of its own.

    waiting ──credit──> granted ──KV committed──> running ──last token──> gone
                                                  │    ▲
                                        no blocks ▼    │ blocks again: recompute what is lost, in chunks
                                                preempted

Order is order of arrival and never changes. Credits are bounded by blocks and by max_num_seqs; a reservation takes
the blocks of its prompt and of the first token to come, and leaves every running request one block to grow into.
A running request that finds no block preempts the youngest running one. The oldest is never preempted, and no
request is admitted that could not fit into the pool alone, so the oldest always finishes.

Full blocks are shared by name. Credit starts with the prompt's leading blocks that the pool still holds: they need no
transfer, and from then on nobody can have them for other tokens, so they count as taken. A request publishes its
prompt's blocks at commit and later ones as they fill up; they stay cached when it ends or is preempted. It only ever
writes behind what is published: the block of the token to come is its own. Sharing takes nothing from the promise
above: with every other request preempted, all blocks but the oldest's own are free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.blocks import BlockAllocator, BlockLease
from engine.errors import RequestError
from engine.layout import KVLayout
from engine.prefix import BlockNames, root_name
from engine.requests import FinishReason, Request, SampledToken, Work, finish_reason
from protos import reasons


class State(Enum):
    """Where a request stands on this node."""

    WAITING = auto()  # for credit
    GRANTED = auto()  # blocks are leased, the KV is on its way
    RUNNING = auto()
    PREEMPTED = auto()  # gave up its blocks, computes again what is lost of them when there is room


@dataclass(slots=True, eq=False)
class Reservation:
    """One request on this node."""

    request: Request
    names: BlockNames
    waiting_since: float
    state: State = State.WAITING
    lease: BlockLease | None = None
    num_cached_blocks: int = 0  # the prompt's leading blocks that were there when it got credit: not to be sent
    num_computed: int = 0
    in_step: bool = False
    cancelled: bool = False  # no further step takes it


@dataclass(frozen=True, slots=True)
class Answered:
    """One token that a step added to a request."""

    reservation: Reservation
    token: SampledToken
    finish_reason: FinishReason | None


class DecodeScheduler:
    """Waiting, granted, running and preempted requests of one decode node."""

    def __init__(
        self,
        allocator: BlockAllocator,
        layout: KVLayout,
        eos_token_ids: Sequence[int],
        *,
        fingerprint: Mapping[str, str],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_queued: int,
    ) -> None:
        self._allocator = allocator
        self._layout = layout
        self._fingerprint = fingerprint
        self._eos_token_ids = eos_token_ids
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_queued = max_num_queued
        self._reservations: dict[Reservation, None] = {}  # in order of arrival
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of all requests that ever joined the batch
        self.num_cached_tokens = 0  # of them, those whose KV was there already

    # ---- credit ----

    def reserve(self, request: Request, now: float) -> Reservation:
        """Queues a request for credit. Raises RequestError when the queue is full or it could never finish here."""
        num_answer_tokens = request.sampling.max_tokens - request.num_output_tokens
        num_blocks = self._layout.num_blocks_for(len(request.token_ids) + num_answer_tokens)
        if num_blocks > self._allocator.num_blocks:
            raise RequestError(
                reasons.PROMPT_TOO_LONG,
                f"prompt and max_tokens need {num_blocks} KV blocks, the decode node has {self._allocator.num_blocks}",
            )
        if self.count(State.WAITING) >= self._max_num_queued:
            raise RequestError(reasons.QUEUE_FULL, f"the decode queue holds its {self._max_num_queued} requests")
        names = BlockNames(root_name(self._fingerprint, request.cache_salt), self._layout.block_size)
        reservation = Reservation(request, names, waiting_since=now)
        self._reservations[reservation] = None
        return reservation

    def grant(self) -> list[Reservation]:
        """Leases blocks to those whose turn it is; they are GRANTED now and wait for their KV."""
        granted: list[Reservation] = []
        if self.count(State.PREEMPTED):
            return granted  # they were here first
        num_holding = self.count(State.GRANTED) + self.count(State.RUNNING)
        for reservation in list(self._in_state(State.WAITING)):
            num_tokens = len(reservation.request.token_ids)
            if num_holding >= self._max_num_seqs:
                break
            lease = self._lease(reservation, num_tokens + 1, num_cacheable=num_tokens, num_spare=num_holding)
            if lease is None:
                break
            reservation.lease = lease
            reservation.num_cached_blocks = lease.num_cached
            reservation.state = State.GRANTED
            granted.append(reservation)
            num_holding += 1
        return granted

    def overdue(self, waiting_since: float) -> list[Reservation]:
        """Those that have waited for credit since before this time."""
        return [each for each in self._in_state(State.WAITING) if each.waiting_since < waiting_since]

    def commit(self, reservation: Reservation, first_token_id: int) -> None:
        """The prompt's KV is all there: the request joins the batch with the next step."""
        assert reservation.state is State.GRANTED
        reservation.state = State.RUNNING
        reservation.num_computed = len(reservation.request.token_ids)
        self._publish(reservation)
        self.num_prompt_tokens += reservation.num_computed
        self.num_cached_tokens += reservation.num_cached_blocks * self._layout.block_size
        reservation.request.token_ids.append(first_token_id)

    # ---- steps ----

    def plan(self) -> list[Work]:
        """Shares of the next step: one token for each that decodes, then chunks of those that compute again."""
        self._resume()
        budget = self._max_num_batched_tokens
        works: list[Work] = []
        for reservation in sorted(self._in_state(State.RUNNING), key=_computes_again):
            num_tokens = min(budget, _num_missing_tokens(reservation))
            if reservation.cancelled or num_tokens == 0 or not self._hold(reservation, num_tokens):
                continue
            budget -= num_tokens
            reservation.in_step = True
            works.append(_work(reservation, num_tokens))
        return works

    def apply(self, works: list[Work], tokens: list[SampledToken]) -> list[Answered]:
        """Takes in a finished step. A finished request stays until `remove`."""
        by_request = {reservation.request: reservation for reservation in self._reservations}
        sampled = iter(tokens)
        answered: list[Answered] = []
        for work in works:
            reservation = by_request[work.request]
            reservation.in_step = False
            reservation.num_computed += work.num_tokens
            self._publish(reservation)
            if reservation.num_computed == len(work.request.token_ids):
                token = next(sampled)
                work.request.token_ids.append(token.token_id)
                answered.append(Answered(reservation, token, finish_reason(work.request, self._eos_token_ids)))
        return answered

    def remove(self, reservation: Reservation) -> None:
        """Forgets a request and frees its blocks. Not while it is in a step."""
        assert not reservation.in_step, "a request was removed in the middle of a step"
        del self._reservations[reservation]
        if reservation.lease is not None:
            reservation.lease.release()

    # ---- figures ----

    @property
    def num_requests(self) -> int:
        return len(self._reservations)

    def count(self, state: State) -> int:
        return sum(1 for _ in self._in_state(state))

    # ---- blocks ----

    def _hold(self, reservation: Reservation, num_tokens: int) -> bool:
        """Whether the request runs and has blocks for num_tokens more; may preempt the youngest, itself too."""
        while reservation.state is State.RUNNING:
            assert reservation.lease is not None
            num_blocks = self._layout.num_blocks_for(reservation.num_computed + num_tokens)
            missing = num_blocks - len(reservation.lease.block_ids)
            if missing <= self._allocator.num_free:
                reservation.lease.grow(max(missing, 0))
                return True
            victim = self._youngest_running()
            if victim is self._oldest():
                return False  # what is granted will commit or expire, and then there is another victim
            self._preempt(victim)
        return False

    def _youngest_running(self) -> Reservation:
        return next(each for each in reversed(self._reservations) if each.state is State.RUNNING and not each.in_step)

    def _oldest(self) -> Reservation:
        return next(each for each in self._reservations if each.state in (State.RUNNING, State.PREEMPTED))

    def _preempt(self, reservation: Reservation) -> None:
        assert reservation.lease is not None
        reservation.lease.release()
        reservation.lease = None
        reservation.state = State.PREEMPTED
        reservation.num_computed = 0
        self.num_preemptions += 1

    def _resume(self) -> None:
        """Gives preempted requests blocks again, oldest first, with one spare block for each that runs."""
        for reservation in list(self._in_state(State.PREEMPTED)):
            num_tokens, num_running = len(reservation.request.token_ids), self.count(State.RUNNING)
            # The last token is computed in any case: its logits choose the next.
            lease = self._lease(reservation, num_tokens, num_cacheable=num_tokens - 1, num_spare=num_running)
            if lease is None:
                return
            reservation.lease = lease
            reservation.num_computed = lease.num_cached * self._layout.block_size
            reservation.state = State.RUNNING

    def _lease(
        self, reservation: Reservation, num_tokens: int, *, num_cacheable: int, num_spare: int
    ) -> BlockLease | None:
        """Blocks for num_tokens tokens, if that leaves num_spare free; of the leading num_cacheable tokens, full
        blocks that the pool holds."""
        num_blocks = self._layout.num_blocks_for(num_tokens)
        names = self._names(reservation, num_cacheable)
        if self._allocator.num_needed(num_blocks, names) + num_spare > self._allocator.num_free:
            return None
        return self._allocator.allocate(num_blocks, names)

    def _publish(self, reservation: Reservation) -> None:
        """Lets others use the blocks that are full of computed KV."""
        assert reservation.lease is not None
        if reservation.num_computed // self._layout.block_size > reservation.lease.num_published:
            reservation.lease.publish(self._names(reservation, reservation.num_computed))

    def _names(self, reservation: Reservation, num_tokens: int) -> list[bytes]:
        """Names of the full blocks of the leading num_tokens tokens."""
        if not self._allocator.caching:
            return []
        return reservation.names.names_of(reservation.request.token_ids)[: num_tokens // self._layout.block_size]

    def _in_state(self, state: State) -> Iterator[Reservation]:
        return (reservation for reservation in self._reservations if reservation.state is state)


def _num_missing_tokens(reservation: Reservation) -> int:
    """Known tokens whose KV is not in the pool: 1 for a request that decodes."""
    return len(reservation.request.token_ids) - reservation.num_computed


def _computes_again(reservation: Reservation) -> bool:
    return _num_missing_tokens(reservation) > 1


def _work(reservation: Reservation, num_tokens: int) -> Work:
    assert reservation.lease is not None
    return Work(reservation.request, reservation.num_computed, num_tokens, reservation.lease.block_ids)
