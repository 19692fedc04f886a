"""Which requests hold blocks, and which tokens the next step computes. No I/O, no clock of its own.

    waiting ──credit──> granted ──KV committed──> running ──last token──> gone
       │                                          ▲  │ ▲
       └──credit, and the prompt is local─────────┘  │ │ blocks again: recompute what is lost, in chunks
                                           no blocks ▼ │
                                                preempted

Order is order of arrival and never changes. Credits are bounded by blocks and by max_num_seqs; a reservation takes
the blocks of its prompt and of the first token to come, and leaves every running request one block to grow into.
A running request that finds no block preempts the youngest running one. The oldest is never preempted, and no
request is admitted that could not fit into the pool alone, so the oldest always finishes.

A local prompt runs from credit on: chunk by chunk beside those that decode, until its last token is computed, whose
logits choose the first token. A step takes one token of every request that decodes, and what its budget leaves goes to
chunks, in order of arrival. As the budget is at least max_num_seqs, every request that decodes gets its token, and one
prompt at least gets on with every step. What is preempted in the middle of its prompt begins again.

Full blocks are shared by name. Credit starts with the prompt's leading blocks that the pool still holds: they need no
transfer, and from then on nobody can have them for other tokens, so they count as taken. A local prompt looks again
when its first chunk is planned, as those before it may have left what it needs. A request publishes its
prompt's blocks at commit and later ones as they fill up; they stay cached when it ends or is preempted. It only ever
writes behind what is published: the block of the token to come is its own. Sharing takes nothing from the promise
above: with every other request preempted, all blocks but the oldest's own are free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from decode_node.leases import Leases
from decode_node.reservation import Reservation, State
from serving_core import reasons
from serving_core.blocks import BlockAllocator
from serving_core.errors import RequestError
from serving_core.layout import KVLayout
from serving_core.prefix import BlockNames, root_name
from serving_core.requests import FinishReason, Request, SampledToken, Work, finish_reason


@dataclass(frozen=True, slots=True)
class Answered:
    """One token that a step added to a request."""

    reservation: Reservation
    token: SampledToken
    finish_reason: FinishReason | None
    is_first: bool  # of a local prompt


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
        self._leases = Leases(allocator, layout)
        self._fingerprint = fingerprint
        self._eos_token_ids = eos_token_ids
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_queued = max_num_queued
        self._reservations: dict[Reservation, None] = {}  # in order of arrival
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of all requests whose prompt was ever committed, or begun here
        self.num_cached_tokens = 0  # of them, those whose KV was there already

    # ---- credit ----

    def reserve(self, request: Request, now: float, *, local_prefill: bool = False) -> Reservation:
        """Queues a request for credit; with local_prefill its prompt is computed here. Raises RequestError when the
        queue is full or it could never finish here."""
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
        reservation = Reservation(request, names, now, local_prefill)
        self._reservations[reservation] = None
        return reservation

    def grant(self) -> list[Reservation]:
        """Leases blocks to those whose turn it is: they are GRANTED now and wait for their KV, or RUNNING where the
        prompt is local."""
        granted: list[Reservation] = []
        if self.count(State.PREEMPTED):
            return granted  # they were here first
        num_holding = self.count(State.GRANTED) + self.count(State.RUNNING)
        for reservation in list(self._in_state(State.WAITING)):
            if num_holding >= self._max_num_seqs:
                break
            num_tokens = len(reservation.request.token_ids)
            num_cacheable = _num_cacheable(reservation)
            if not self._leases.take(reservation, num_tokens + 1, num_cacheable=num_cacheable, num_spare=num_holding):
                break
            self._start_at_cached(reservation)
            reservation.state = State.RUNNING if reservation.local_prefill else State.GRANTED
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
        self._leases.publish(reservation)
        self._begin(reservation)
        reservation.has_first_token = True
        reservation.request.token_ids.append(first_token_id)

    # ---- steps ----

    def plan(self) -> list[Work]:
        """Shares of the next step: one token for each that decodes, then chunks of prompts and of those that compute
        again."""
        self._resume()
        budget = self._max_num_batched_tokens
        works: list[Work] = []
        for reservation in sorted(self._in_state(State.RUNNING), key=_computes_chunks):
            if reservation.cancelled or budget == 0 or reservation.state is not State.RUNNING:
                continue
            if not reservation.has_begun:
                self._leases.renew(reservation, num_cacheable=_num_cacheable(reservation))
                self._start_at_cached(reservation)
                self._begin(reservation)
            num_tokens = min(budget, reservation.num_missing_tokens)
            if self._hold(reservation, num_tokens):
                budget -= num_tokens
                reservation.in_step = True
                works.append(reservation.work(num_tokens))
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
            self._leases.publish(reservation)
            if reservation.num_missing_tokens == 0:
                token, is_first = next(sampled), reservation.computes_prompt
                work.request.token_ids.append(token.token_id)
                reservation.has_first_token = True
                reason = finish_reason(work.request, self._eos_token_ids)
                answered.append(Answered(reservation, token, reason, is_first))
        return answered

    def remove(self, reservation: Reservation) -> None:
        """Forgets a request and frees its blocks. Not while it is in a step."""
        assert not reservation.in_step, "a request was removed in the middle of a step"
        del self._reservations[reservation]
        self._leases.give_back(reservation)

    # ---- figures ----

    @property
    def num_requests(self) -> int:
        return len(self._reservations)

    def count(self, state: State) -> int:
        return sum(1 for _ in self._in_state(state))

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of local prompts still to be computed, as far as one can tell before they have blocks."""
        return sum(
            len(each.request.token_ids) - self._num_done(each) for each in self._reservations if each.computes_prompt
        )

    def _num_done(self, reservation: Reservation) -> int:
        if reservation.lease is not None:
            return reservation.num_computed
        return self._leases.num_held_tokens(reservation, _num_cacheable(reservation))

    # ---- prompts ----

    def _start_at_cached(self, reservation: Reservation) -> None:
        """The lease has just been taken for a prompt of which nothing else is there."""
        assert reservation.lease is not None
        reservation.num_cached_blocks = reservation.lease.num_cached
        reservation.num_computed = reservation.num_cached_blocks * self._layout.block_size

    def _begin(self, reservation: Reservation) -> None:
        """Counts a prompt, once."""
        reservation.has_begun = True
        self.num_prompt_tokens += len(reservation.request.token_ids)
        self.num_cached_tokens += reservation.num_cached_blocks * self._layout.block_size

    # ---- blocks ----

    def _hold(self, reservation: Reservation, num_tokens: int) -> bool:
        """Whether the request runs and has blocks for num_tokens more; may preempt the youngest, itself too."""
        while reservation.state is State.RUNNING:
            if self._leases.grow(reservation, reservation.num_computed + num_tokens):
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
        self._leases.give_back(reservation)
        reservation.state = State.PREEMPTED
        reservation.num_computed = 0
        self.num_preemptions += 1

    def _resume(self) -> None:
        """Gives preempted requests blocks again, oldest first, with one spare block for each that runs."""
        for reservation in list(self._in_state(State.PREEMPTED)):
            num_tokens, num_running = len(reservation.request.token_ids), self.count(State.RUNNING)
            # The last token is computed in any case: its logits choose the next.
            if not self._leases.take(reservation, num_tokens, num_cacheable=num_tokens - 1, num_spare=num_running):
                return
            assert reservation.lease is not None
            reservation.num_computed = reservation.lease.num_cached * self._layout.block_size
            reservation.state = State.RUNNING

    def _in_state(self, state: State) -> Iterator[Reservation]:
        return (reservation for reservation in self._reservations if reservation.state is state)


def _num_cacheable(reservation: Reservation) -> int:
    """Leading tokens of a prompt whose KV need not come. The last of a local one is computed in any case: its logits
    choose the first token."""
    num_tokens = len(reservation.request.token_ids)
    return num_tokens - 1 if reservation.local_prefill else num_tokens


def _computes_chunks(reservation: Reservation) -> bool:
    return reservation.num_missing_tokens > 1
