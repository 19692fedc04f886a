"""A prefill node: prompts in, first tokens and KV blocks out.

The life of an attempt here:
1. `Prefill` queues the prompt in the scheduler.
2. Steps compute it in chunks. `Deliver` brings the decode node's ticket, before, during or after that; from then
   on blocks leave layer by layer, while later layers and chunks are being computed.
3. The last chunk samples the first token: it goes to the coordinator at once, and behind the last block to the
   decode node.
4. The decode node commits; only then are the blocks freed and `Transferred` is sent.

How an attempt ends (by transfer, failure, cancel, or a first token that ends the answer): protos/attempts.py.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial

from engine.blocks import BlockAllocator
from engine.engine import Engine
from engine.errors import RequestError
from engine.requests import Request, SampledToken, Work, finish_reason
from engine.stepper import Stepper
from kv_transfer.errors import TransferError
from kv_transfer.sender import KVSender, SendingTransfer, Sent, TransferFailed
from prefill_node.scheduler import PrefillScheduler, Prompt
from prefill_node.settings import PrefillSettings
from protos import convert, fleet_pb2, reasons
from protos.attach import FleetLink
from protos.attempts import Attempts
from protos.reports import new_incarnation, node_info, node_load

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Attempt:
    """One request on this node, from Prefill until everything it holds is free."""

    prompt: Prompt
    scheduler: PrefillScheduler
    started_at: float | None = None
    transfer: SendingTransfer | None = None
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
        if self.transfer is not None and self.is_sending:
            self.transfer.cancel()

    def release(self) -> None:
        self.scheduler.remove(self.prompt)


class PrefillNode:
    """Owns the scheduler and the attempts; runs on one event loop."""

    def __init__(self, settings: PrefillSettings, name: str, engine: Engine, sender: KVSender, link: FleetLink) -> None:
        self._settings = settings
        self._name = name
        self._incarnation = new_incarnation()
        self._engine = engine
        self._sender = sender
        self._link = link
        self._stepper = Stepper(engine)
        self._allocator = BlockAllocator(engine.num_blocks)
        self._scheduler = PrefillScheduler(
            self._allocator,
            engine.layout,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_queued=settings.max_num_queued,
        )
        self._work = asyncio.Event()
        self._attempts: Attempts[Attempt] = Attempts(link.send, self._work.set)
        self._draining = False

    # ---- the link's view ----

    def hello(self) -> fleet_pb2.Hello:
        return fleet_pb2.Hello(
            node=node_info(
                self._name, "prefill", self._incarnation, self._engine.fingerprint, self._engine.description
            ),
            num_blocks=self._engine.num_blocks,
            block_size=self._engine.layout.block_size,
            max_model_len=self._engine.max_model_len,
            max_num_queued=self._settings.max_num_queued,
        )

    def heartbeat(self) -> fleet_pb2.Heartbeat:
        load = node_load(self._name, "prefill", self._stepper, self._allocator, draining=self._draining)
        load.num_running = self._scheduler.num_running
        load.num_waiting = self._scheduler.num_waiting
        load.num_waiting_tokens = self._scheduler.num_waiting_tokens
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
        await self._stepper.run(self._scheduler.plan, self._step, self._work)

    # ---- commands ----

    def _prefill(self, job: fleet_pb2.Job) -> None:
        try:
            if self._draining:
                raise RequestError(reasons.DRAINING, "the prefill node is draining")
            self._attempts.check_new(job.attempt)
            prompt = self._scheduler.add(convert.request_from_wire(job))
        except RequestError as error:
            self._attempts.refuse(job.attempt, error)
            return
        self._attempts.add(Attempt(prompt, self._scheduler))
        self._work.set()

    def _deliver(self, deliver: fleet_pb2.Deliver) -> None:
        attempt = self._attempts.live(deliver.attempt)
        if attempt is None or attempt.transfer is not None:
            return
        try:
            attempt.transfer = self._sender.start(deliver.ticket, partial(self._sent, attempt))
        except TransferError as error:
            self._attempts.fail(attempt, reasons.TRANSFER_FAILED, str(error))
            return
        attempt.is_sending = True
        self._send_blocks(attempt)

    # ---- one step ----

    async def _step(self, works: list[Work]) -> None:
        now = time.monotonic()
        for work in works:
            attempt = self._attempts.of(work.request)
            if attempt.started_at is None:
                attempt.started_at = now
        try:
            tokens, _ = await self._stepper.step(works, partial(self._send_layers, works))
        except Exception as error:
            logger.exception("a prefill step failed")
            self._fail_step(works, error)
            return
        for prompt, token in self._scheduler.apply(works, tokens):
            attempt = self._attempts.of(prompt.request)
            if token is not None and not prompt.cancelled:
                self._answer(attempt, token)
            if not prompt.cancelled:
                self._send_blocks(attempt)
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
        prefill_s = time.monotonic() - attempt.started_at
        self._link.send(first_token=fleet_pb2.FirstToken(attempt=wire.attempt, token=wire, prefill_s=prefill_s))
        if reason is not None:
            self._attempts.end(attempt)
            return
        attempt.tail = convert.token_to_tail(token.token_id)
        if attempt.transfer is None:
            timeout_s = self._settings.ticket_timeout_s
            attempt.ticket_timer = asyncio.get_running_loop().call_later(timeout_s, self._ticket_late, attempt)

    def _ticket_late(self, attempt: Attempt) -> None:
        message = f"no ticket came within {self._settings.ticket_timeout_s} s"
        self._attempts.fail(attempt, reasons.TRANSFER_FAILED, message)

    # ---- the transfer ----

    def _send_layers(self, works: list[Work], num_layers: int) -> None:
        """In the middle of a step: its blocks are final in the leading layers, and leave while the rest is computed."""
        for work in works:
            attempt = self._attempts.of(work.request)
            if attempt.transfer is not None and not attempt.prompt.cancelled:
                num_blocks = self._num_final_blocks(attempt.prompt, work.start + work.num_tokens)
                attempt.transfer.blocks_ready(work.block_ids[:num_blocks], num_layers)

    def _send_blocks(self, attempt: Attempt) -> None:
        """Hands over what is computed: full blocks while the prompt runs, all of it at its end."""
        prompt = attempt.prompt
        if attempt.transfer is None or prompt.lease is None:
            return
        if attempt.ticket_timer is not None:
            attempt.ticket_timer.cancel()
        if prompt.is_computed:
            attempt.transfer.finish(prompt.lease.block_ids, attempt.tail)
        else:
            num_blocks = self._num_final_blocks(prompt, prompt.num_computed)
            attempt.transfer.blocks_ready(prompt.lease.block_ids[:num_blocks])

    def _num_final_blocks(self, prompt: Prompt, num_computed: int) -> int:
        """Blocks that no later chunk writes to: the full ones, and at the end of the prompt the last one too."""
        layout = self._engine.layout
        if num_computed == prompt.num_tokens:
            return layout.num_blocks_for(num_computed)
        return num_computed // layout.block_size

    def _sent(self, attempt: Attempt, result: Sent | TransferFailed) -> None:
        attempt.is_sending = False
        if isinstance(result, Sent):
            wire = convert.attempt_of(attempt.request)
            self._attempts.end(attempt, transferred=fleet_pb2.Transferred(attempt=wire, num_bytes=result.num_bytes))
        else:
            self._attempts.fail(attempt, result.reason, result.message)
