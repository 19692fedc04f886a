"""A decode node: KV blocks in, answers out.

The life of an attempt here:
1. `Reserve` queues it for credit in the scheduler.
2. Credit: blocks are leased, every rank grants them to the transfer, and `Reserved` carries a ticket for them to the
   coordinator. Leading blocks that the node holds already are not to be sent.
3. The prefill node sends the blocks; each rank's receiver verifies every one of its own, and when all have, the
   request is committed: `Committed`.
4. The request joins the batch with the next step; every step's tokens go out in one `StepTokens`.

A local prompt needs no transfer: with credit it is computed here in chunks, beside the batch. Its first token goes out
as `FirstToken`; from then on it is one of the batch.

How an attempt ends (with its last token, by failure or by cancel): protos/attempts.py.
"""

import asyncio
import logging
import time
from typing import Final

from decode_node.attempt import Attempt
from decode_node.reservation import State
from decode_node.scheduler import Answered, DecodeScheduler
from decode_node.settings import DecodeSettings
from decode_node.transfers import Transfers
from engine.engine import Engine
from engine.stepper import Stepper
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.results import Received
from protos import convert, fleet_pb2
from protos.attach import FleetLink
from protos.attempts import Attempts
from protos.ranks import Followers
from protos.reports import CacheReport, new_incarnation, node_info, node_load, rank_loads
from serving_core import reasons
from serving_core.blocks import BlockAllocator
from serving_core.errors import RequestError, SettingsError
from serving_core.rates import StepRates
from serving_core.requests import SampledToken, Work
from serving_core.waiting import first_to_end

logger = logging.getLogger(__name__)

CREDIT_CHECK_S: Final = 0.5


class DecodeNode:
    """Rank 0 of a decode node: owns the scheduler and the attempts; runs on one event loop."""

    def __init__(
        self,
        settings: DecodeSettings,
        name: str,
        engine: Engine,
        receiver: KVReceiver,
        followers: Followers,
        link: FleetLink,
        rates: StepRates,
    ) -> None:
        if settings.max_num_batched_tokens < settings.max_num_seqs:
            raise SettingsError(
                f"max_num_batched_tokens ({settings.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({settings.max_num_seqs}): every running request takes one token a step"
            )
        self._settings = settings
        self._name = name
        self._incarnation = new_incarnation()
        self._engine = engine
        self._fingerprint = {**engine.fingerprint, "kv_transport": settings.kv_transport}
        self._followers = followers
        self._link = link
        self._rates = rates
        self._stepper: Stepper[Work, list[SampledToken]] = Stepper(engine.step)
        self._allocator = BlockAllocator(engine.num_blocks, caching=settings.engine.enable_prefix_caching)
        self._cache_report = CacheReport(self._allocator, link.send)
        self._scheduler = DecodeScheduler(
            self._allocator,
            engine.layout,
            engine.eos_token_ids,
            max_num_seqs=settings.max_num_seqs,
            fingerprint=self._fingerprint,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_queued=settings.max_num_queued,
        )
        self._work = asyncio.Event()
        self._attempts: Attempts[Attempt] = Attempts(link.send, self._released)
        self._transfers = Transfers(
            receiver,
            followers,
            engine.model_layout,
            self._attempts,
            ttl_s=settings.ticket_ttl_s,
            send=link.send,
            on_received=self._commit,
        )
        self._draining = False

    # ---- the link's view ----

    def hello(self) -> fleet_pb2.Hello:
        self._cache_report.forget()
        return fleet_pb2.Hello(
            node=node_info(self._name, "decode", self._incarnation, self._fingerprint, self._engine.description),
            num_blocks=self._engine.num_blocks,
            block_size=self._engine.layout.block_size,
            max_model_len=self._engine.max_model_len,
            max_num_seqs=self._settings.max_num_seqs,
            max_num_queued=self._settings.max_num_queued,
            tp_size=1 + len(self._followers),
        )

    def heartbeat(self) -> fleet_pb2.Heartbeat:
        self._cache_report.tell()
        load = node_load(self._name, "decode", self._stepper, self._allocator, draining=self._draining)
        load.num_running = self._scheduler.count(State.RUNNING)
        load.num_waiting = self._scheduler.num_requests - load.num_running
        load.num_waiting_tokens = self._scheduler.num_waiting_tokens
        load.prefill_tokens_per_s = self._rates.prefill_tokens_per_s
        load.step_s = self._rates.decode_step_s or load.step_s
        load.num_preemptions = self._scheduler.num_preemptions
        load.num_prompt_tokens = self._scheduler.num_prompt_tokens
        load.num_cached_tokens = self._scheduler.num_cached_tokens
        load.num_kv_bytes = self._transfers.num_kv_bytes
        load.num_transfers_failed = self._transfers.num_failed
        load.ranks.extend(rank_loads(self._engine, self._followers))
        return fleet_pb2.Heartbeat(load=load, step_age_s=self._stepper.step_age_s)

    def handle(self, command: fleet_pb2.NodeCommand) -> None:
        match command.WhichOneof("command"):
            case "reserve":
                self._reserve(command.reserve)
            case "cancel":
                self._attempts.cancel(command.cancel.attempt)
            case other:
                logger.error("a decode node does not know the command %s", other)

    def detached(self) -> None:
        self._attempts.end_all()

    # ---- the process's view ----

    def drain(self) -> None:
        self._draining = True

    async def idle(self) -> None:
        await self._attempts.idle()

    async def run(self) -> None:
        steps = self._stepper.run(self._scheduler.plan, self._step, self._work)
        # none ends by itself: a failure of one ends them all
        await first_to_end(steps, self._watch_credit(), self._followers.watch())

    # ---- commands ----

    def _reserve(self, reserve: fleet_pb2.Reserve) -> None:
        job = reserve.job
        try:
            self._attempts.check_new(job.attempt)
            reservation = self._scheduler.reserve(
                convert.request_from_wire(job), time.monotonic(), local_prefill=reserve.local_prefill
            )
        except RequestError as error:
            self._attempts.refuse(job.attempt, error)
            return
        prefill_tp = None if reserve.local_prefill else max(1, reserve.prefill_tp_size)
        self._attempts.add(Attempt(reservation, self._scheduler, self._transfers.ranks, prefill_tp))
        self._grant()

    # ---- credit and commit ----

    def _released(self) -> None:
        """Blocks have come free, for running requests and for waiting ones."""
        self._work.set()
        asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        """Hands out whatever credit there is."""
        for reservation in self._scheduler.grant():
            attempt = self._attempts.of(reservation.request)
            if attempt.prefill_tp is None:
                self._work.set()
            else:
                self._transfers.grant(attempt, attempt.prefill_tp)

    def _commit(self, attempt: Attempt, received: Received) -> None:
        try:
            self._scheduler.commit(attempt.reservation, convert.token_from_tail(received.tail))
        except ValueError as error:
            self._attempts.fail(attempt, reasons.TRANSFER_FAILED, str(error))
            return
        committed = fleet_pb2.Committed(
            attempt=convert.attempt_of(attempt.request),
            num_bytes=received.num_bytes,
            num_bytes_saved=attempt.reservation.num_cached_blocks * self._engine.model_layout.block_bytes,
        )
        self._link.send(committed=committed)
        self._cache_report.tell()
        self._work.set()

    async def _watch_credit(self) -> None:
        """Refuses reservations that have waited too long."""
        timeout_s = self._settings.credit_timeout_s
        while True:
            await asyncio.sleep(CREDIT_CHECK_S)
            for reservation in self._scheduler.overdue(time.monotonic() - timeout_s):
                attempt = self._attempts.of(reservation.request)
                message = f"the decode node had no room for the request within {timeout_s} s"
                self._attempts.fail(attempt, reasons.QUEUE_FULL, message)

    # ---- one step ----

    async def _step(self, works: list[Work]) -> None:
        started_at = time.monotonic()
        for work in works:
            self._attempts.of(work.request).note_step(started_at)
        try:
            self._transfers.ranks.announce(works)
            tokens, step_s = await self._stepper.step(works)
        except Exception as error:
            logger.exception("a decode step failed")
            self._followers.fail_step(error)
            self._fail_step(works, error)
            return
        num_decoding = sum(work.num_tokens == 1 for work in works)
        self._rates.add(sum(work.num_tokens for work in works) - num_decoding, num_decoding, step_s)
        answered = self._scheduler.apply(works, tokens)
        if any(answer.finish_reason or answer.is_first for answer in answered):
            self._cache_report.tell()  # before the client can ask again
        self._report(answered, step_s)
        for answer in answered:
            if answer.finish_reason is not None:
                self._attempts.end(self._attempts.of(answer.reservation.request))
        self._attempts.settle_all(work.request for work in works)

    def _report(self, answered: list[Answered], step_s: float) -> None:
        """First tokens of local prompts, and one message for the rest of the step; attempts that were cancelled
        meanwhile are left out."""
        tokens: list[fleet_pb2.SampledToken] = []
        for answer in answered:
            request = answer.reservation.request
            wire = convert.token_to_wire(request, answer.token, answer.finish_reason)
            if answer.reservation.cancelled:
                continue
            if answer.is_first:
                self._link.send(first_token=self._first_token(self._attempts.of(request), wire))
            else:
                tokens.append(wire)
        if tokens:
            self._link.send(step_tokens=fleet_pb2.StepTokens(tokens=tokens, step_s=step_s))

    def _first_token(self, attempt: Attempt, wire: fleet_pb2.SampledToken) -> fleet_pb2.FirstToken:
        assert attempt.prefill_started_at is not None
        return fleet_pb2.FirstToken(
            attempt=wire.attempt,
            token=wire,
            prefill_s=time.monotonic() - attempt.prefill_started_at,
            num_cached_tokens=attempt.reservation.num_cached_blocks * self._engine.layout.block_size,
        )

    def _fail_step(self, works: list[Work], error: Exception) -> None:
        for work in works:
            attempt = self._attempts.of(work.request)
            attempt.reservation.in_step = False
            self._attempts.fail(attempt, reasons.ENGINE_ERROR, f"the decode step failed ({type(error).__name__})")
