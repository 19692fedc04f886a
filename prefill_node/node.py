"""A prefill node: prompts in, first tokens and KV blocks out.

The life of an attempt here:
1. `Prefill` queues the prompt in the scheduler.
2. Steps compute it in chunks, on all ranks together, except what is cached. `Deliver` brings the decode node's ticket,
   before, during or after that; from then on blocks leave layer by layer, while later layers and chunks are being
   computed. Every rank sends its own heads.
3. The last chunk samples the first token: it goes to the coordinator at once, and behind the last block to the
   decode node.
4. The decode node commits; only then are the blocks freed and `Transferred` is sent.

How an attempt ends (by transfer, failure, cancel, or a first token that ends the answer): protos/attempts.py.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from engine.engine import Engine
from engine.stepper import Stepper
from kv_transfer.ends.sender import KVSender
from kv_transfer.results import Sent, TransferFailed
from prefill_node.ranks import PrefillRanks
from prefill_node.scheduler import PrefillScheduler, Prompt
from prefill_node.settings import PrefillSettings
from protos import convert, fleet_pb2
from protos.attach import FleetLink
from protos.attempts import Attempts
from protos.ranks import Followers
from protos.reports import CacheReport, new_incarnation, node_info, node_load, rank_loads
from serving_core import reasons
from serving_core.blocks import BlockAllocator
from serving_core.errors import RequestError
from serving_core.rates import StepRates
from serving_core.requests import Request, SampledToken, Work, finish_reason
from serving_core.waiting import first_to_end

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Attempt:
    """One request on this node, from Prefill until everything it holds is free."""

    prompt: Prompt
    scheduler: PrefillScheduler
    ranks: PrefillRanks
    started_at: float | None = None
    has_ticket: bool = False
    is_sending: bool = False
    tail: bytes = b""  # what goes to the decode node behind the last block: the first token
    ticket_timer: asyncio.TimerHandle | None = None

    @property
    def request(self) -> Request:
        return self.prompt.request

    @property
    def is_busy(self) -> bool:
        return self.prompt.in_step or self.is_sending

    def stop(self) -> None:
        self.prompt.cancelled = True
        if self.ticket_timer is not None:
            self.ticket_timer.cancel()
        if self.is_sending:
            self.ranks.cancel(self.request.epoch)

    def release(self) -> None:
        self.scheduler.remove(self.prompt)


class PrefillNode:
    """Rank 0 of a prefill node: owns the scheduler and the attempts; runs on one event loop."""

    def __init__(
        self,
        settings: PrefillSettings,
        name: str,
        engine: Engine,
        sender: KVSender,
        followers: Followers,
        link: FleetLink,
        rates: StepRates,
    ) -> None:
        self._settings = settings
        self._name = name
        self._incarnation = new_incarnation()
        self._engine = engine
        self._fingerprint = {**engine.fingerprint, "kv_transport": settings.kv_transport}
        self._followers = followers
        self._ranks = PrefillRanks(engine.layout, sender, followers, settings.overlap_min_tokens, self._sent)
        self._link = link
        self._rates = rates
        self._stepper: Stepper[Work, list[SampledToken]] = Stepper(engine.step)
        self._allocator = BlockAllocator(engine.num_blocks, caching=settings.engine.enable_prefix_caching)
        self._cache_report = CacheReport(self._allocator, link.send)
        self._scheduler = PrefillScheduler(
            self._allocator,
            engine.layout,
            fingerprint=self._fingerprint,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_queued=settings.max_num_queued,
        )
        self._work = asyncio.Event()
        self._attempts: Attempts[Attempt] = Attempts(link.send, self._work.set)
        self._sending: dict[int, Attempt] = {}  # by epoch
        self._num_kv_bytes = 0  # sent, over all ranks
        self._num_transfers_failed = 0
        self._draining = False

    # ---- the link's view ----

    def hello(self) -> fleet_pb2.Hello:
        self._cache_report.forget()
        return fleet_pb2.Hello(
            node=node_info(self._name, "prefill", self._incarnation, self._fingerprint, self._engine.description),
            num_blocks=self._engine.num_blocks,
            block_size=self._engine.layout.block_size,
            max_model_len=self._engine.max_model_len,
            max_num_queued=self._settings.max_num_queued,
            tp_size=1 + len(self._followers),
        )

    def heartbeat(self) -> fleet_pb2.Heartbeat:
        self._cache_report.tell()
        load = node_load(self._name, "prefill", self._stepper, self._allocator, draining=self._draining)
        load.num_running = self._scheduler.num_running
        load.num_waiting = self._scheduler.num_waiting
        load.num_waiting_tokens = self._scheduler.num_waiting_tokens
        load.prefill_tokens_per_s = self._rates.prefill_tokens_per_s
        load.num_prompt_tokens = self._scheduler.num_prompt_tokens
        load.num_cached_tokens = self._scheduler.num_cached_tokens
        load.num_kv_bytes = self._num_kv_bytes
        load.num_transfers_failed = self._num_transfers_failed
        load.ranks.extend(rank_loads(self._engine, self._followers))
        return fleet_pb2.Heartbeat(load=load, step_age_s=self._stepper.step_age_s)

    def handle(self, command: fleet_pb2.NodeCommand) -> None:
        match command.WhichOneof("command"):
            case "prefill":
                self._prefill(command.prefill.job)
            case "deliver":
                self._deliver(command.deliver)
            case "cancel":
                self._attempts.cancel(command.cancel.attempt)
            case other:
                logger.error("a prefill node does not know the command %s", other)

    def detached(self) -> None:
        self._attempts.end_all()

    # ---- the process's view ----

    def drain(self) -> None:
        self._draining = True

    async def idle(self) -> None:
        await self._attempts.idle()

    async def run(self) -> None:
        steps = self._stepper.run(self._scheduler.plan, self._step, self._work)
        await first_to_end(steps, self._followers.watch())

    # ---- commands ----

    def _prefill(self, job: fleet_pb2.Job) -> None:
        try:
            self._attempts.check_new(job.attempt)
            prompt = self._scheduler.add(convert.request_from_wire(job))
        except RequestError as error:
            self._attempts.refuse(job.attempt, error)
            return
        self._attempts.add(Attempt(prompt, self._scheduler, self._ranks))
        self._work.set()

    def _deliver(self, deliver: fleet_pb2.Deliver) -> None:
        attempt = self._attempts.live(deliver.attempt)
        if attempt is None or attempt.has_ticket:
            return
        attempt.has_ticket = attempt.is_sending = True
        if attempt.ticket_timer is not None:
            attempt.ticket_timer.cancel()
        self._sending[attempt.request.epoch] = attempt
        self._ranks.send(attempt.request.epoch, deliver.ticket, self._final_blocks(attempt.prompt))
        if attempt.tail and attempt.is_sending:
            self._finish(attempt)

    # ---- one step ----

    async def _step(self, works: list[Work]) -> None:
        now = time.monotonic()
        for work in works:
            attempt = self._attempts.of(work.request)
            if attempt.started_at is None:
                attempt.started_at = now
        try:
            self._ranks.announce(works)
            tokens, step_s = await self._stepper.step(works, self._ranks.on_layer(works))
        except Exception as error:
            logger.exception("a prefill step failed")
            self._followers.fail_step(error)
            self._fail_step(works, error)
            return
        self._rates.add(sum(work.num_tokens for work in works), 0, step_s)
        for prompt, token in self._scheduler.apply(works, tokens):
            if token is not None and not prompt.cancelled:
                self._answer(self._attempts.of(prompt.request), token)
        self._cache_report.tell()
        self._attempts.settle_all(work.request for work in works)

    def _fail_step(self, works: list[Work], error: Exception) -> None:
        for work in works:
            attempt = self._attempts.of(work.request)
            attempt.prompt.in_step = False
            self._attempts.fail(attempt, reasons.ENGINE_ERROR, f"the prefill step failed ({type(error).__name__})")

    def _answer(self, attempt: Attempt, token: SampledToken) -> None:
        """The prompt is computed and its first token is known."""
        request = attempt.prompt.request
        reason = finish_reason(request, self._engine.eos_token_ids)
        wire = convert.token_to_wire(request, token, reason)
        assert attempt.started_at is not None
        first_token = fleet_pb2.FirstToken(
            attempt=wire.attempt,
            token=wire,
            prefill_s=time.monotonic() - attempt.started_at,
            num_cached_tokens=attempt.prompt.num_cached_tokens,
        )
        self._link.send(first_token=first_token)
        if reason is not None:
            self._attempts.end(attempt)
            return
        attempt.tail = convert.token_to_tail(token.token_id)
        if attempt.has_ticket:
            self._finish(attempt)
        else:
            timeout_s = self._settings.ticket_timeout_s
            attempt.ticket_timer = asyncio.get_running_loop().call_later(timeout_s, self._ticket_late, attempt)

    def _ticket_late(self, attempt: Attempt) -> None:
        message = f"no ticket came within {self._settings.ticket_timeout_s} s"
        self._attempts.fail(attempt, reasons.TRANSFER_FAILED, message)

    # ---- the transfer ----

    def _final_blocks(self, prompt: Prompt) -> list[int]:
        """The blocks that no step to come will write to."""
        if prompt.lease is None:
            return []
        num_blocks = prompt.num_computed // self._engine.layout.block_size
        return prompt.lease.block_ids[:num_blocks]

    def _finish(self, attempt: Attempt) -> None:
        assert attempt.prompt.lease is not None
        self._ranks.finish(attempt.request.epoch, attempt.prompt.lease.block_ids, attempt.tail)

    def _sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        attempt = self._sending.pop(epoch)
        attempt.is_sending = False
        if isinstance(result, Sent):
            self._num_kv_bytes += result.num_bytes
            wire = convert.attempt_of(attempt.request)
            self._attempts.end(attempt, transferred=fleet_pb2.Transferred(attempt=wire, num_bytes=result.num_bytes))
        else:
            self._num_transfers_failed += 1
            self._attempts.fail(attempt, result.reason, result.message)
