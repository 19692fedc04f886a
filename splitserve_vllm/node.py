"""Serve a node's requests with vLLM: the coordinator's commands go in, vLLM's tokens and transfers go out.

vLLM's scheduler decides what each step computes: chunk budgets, deadlines, priorities and the order of credits are its
own, and running sequences do not migrate. Everything else is as on a node with our engine. Each attempt is a task.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.results import Received, TransferFailed, combined
from protos import convert, fleet_pb2, inference_pb2, ranks_pb2
from protos.convert import PROTOCOL_VERSION
from serving_core import reasons
from serving_core.errors import RankLost, RequestError
from serving_core.node.costs import StepRates
from serving_core.process.memory import resident_bytes
from serving_core.requests import FinishReason, Request, SampledToken
from serving_core.shapes import Shape, check_shape, preset, role_of
from serving_core.tasks import first_to_end
from serving_core.version import VERSION
from serving_node.ranks.leading import Followers
from splitserve_vllm.prefixes import CachedPrefixes
from splitserve_vllm.sampling import finish_of, sampling_fields, token_of
from splitserve_vllm.scheduling import ADDRESSES, RECEIVE, SEND, SENDERS
from splitserve_vllm.seam import Stats, Token, VllmFacts

logger = logging.getLogger(__name__)

CHECK_S: Final = 0.5  # between two looks at vLLM


class Engine(Protocol):
    """Define what the node needs of vLLM (seam.py)."""

    @property
    def facts(self) -> VllmFacts: ...
    @property
    def is_dead(self) -> bool: ...

    def generate(
        self,
        request_id: str,
        token_ids: list[int],
        fields: Mapping[str, Any],
        transfer: Mapping[str, Any],
        cache_salt: str,
    ) -> AsyncGenerator[Token]: ...


class Link(Protocol):
    """Define the way to the coordinator."""

    def send(self, **event: Any) -> None: ...


class EngineLost(RankLost):
    """Report that vLLM has died or gives no results any more."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt on this node."""

    request: Request
    task: "asyncio.Task[None] | None" = None
    num_prefilled: int = 0  # prompt tokens that this node has computed or waits for
    has_descriptor: asyncio.Event = field(default_factory=asyncio.Event)
    num_credits: int = 0  # of workers
    credited: asyncio.Event = field(default_factory=asyncio.Event)  # by all of them
    results: list[Received | TransferFailed] = field(default_factory=list)  # of its transfer, by workers
    ended: "asyncio.Future[Received | TransferFailed] | None" = None  # of its transfer
    kept: asyncio.Event = field(default_factory=asyncio.Event)
    num_bytes_saved: int = 0  # of KV that vLLM had cached
    is_running: bool = False

    @property
    def wire(self) -> fleet_pb2.Attempt:
        return convert.attempt_of(self.request)


class _Output(NamedTuple):
    """One output token of an attempt."""

    token: SampledToken
    reason: FinishReason | None
    prefill_s: float
    num_cached_tokens: int  # of the prompt


class VllmNode:
    """A node whose engine is vLLM, with a worker for each tensor-parallel rank."""

    def __init__(
        self,
        name: str,
        role: str,
        engine: Engine,
        workers: Followers,
        link: Link,
        rates: StepRates,
        *,
        fingerprint: Mapping[str, str],
        numerics: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        max_num_queued: int,
        descriptor_timeout_s: float,
        credit_timeout_s: float,
        step_timeout_s: float,
        kv_events: Callable[[], Awaitable[bytes]],
    ) -> None:
        """Create the node of a started vLLM, whose workers have joined `workers`. `kv_events` waits for events."""
        self._name, self._role, self._engine, self._workers, self._link = name, role, engine, workers, link
        self._rates = rates
        self._fingerprint, self._numerics = dict(fingerprint), dict(numerics)
        self._eos_token_ids = eos_token_ids
        self._max_num_queued = max_num_queued
        self._descriptor_timeout_s, self._credit_timeout_s = descriptor_timeout_s, credit_timeout_s
        self._step_timeout_s = step_timeout_s
        self._kv_events = kv_events
        self._prefixes = CachedPrefixes(fingerprint, numerics, engine.facts.block_size)
        self._incarnation = secrets.token_hex(16)
        facts = engine.facts
        self._limits = {"max_num_batched_tokens": facts.max_num_batched_tokens, "max_num_seqs": facts.max_num_seqs}
        self._shape = self._home = preset(role, **self._limits)
        self._attempts: dict[int, _Attempt] = {}  # by epoch
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self._stats = Stats(0, 0, 0.0, 0, 0)
        self._heard_s = time.monotonic()  # of the last result of vLLM, or of the time when it had nothing to do
        self._num_steps = self._num_prompt_tokens = self._num_cached_tokens = self._num_prefill_tokens = 0
        self._num_kv_bytes = self._num_transfers_failed = 0
        self._tokens: fleet_pb2.StepTokens | None = None  # of this turn of the loop
        workers.on_event = self._take_event

    # ---- for the link ----

    def hello(self) -> fleet_pb2.Hello:
        """Return the node's identity and sizes."""
        self._prefixes.forget()
        facts = self._engine.facts
        return fleet_pb2.Hello(
            node=inference_pb2.NodeInfo(
                name=self._name,
                role=self._role,
                incarnation=self._incarnation,
                version=VERSION,
                fingerprint={"protocol_version": PROTOCOL_VERSION, **self._fingerprint},
                engine={"engine": "vllm", "device": facts.device, "dtype": facts.dtype},
                numerics=self._numerics,
            ),
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_num_queued=self._max_num_queued,
            tp_size=len(self._workers),
            pp_size=1,
            shape=convert.shape_to_wire(self._shape),
            home=convert.shape_to_wire(self._home),
            kv_keys=[key for key in self._workers.kv_keys.values() if key],
            keeps_sequences=True,
        )

    @property
    def num_blocks_free(self) -> int:
        num_blocks = self._engine.facts.num_blocks
        return max(0, num_blocks - round(self._stats.kv_usage * num_blocks))

    def heartbeat(self) -> fleet_pb2.Heartbeat:
        """Return the node's load, and report the changes of vLLM's prefix cache."""
        self._report_prefixes()
        return fleet_pb2.Heartbeat(load=self._load(), step_age_s=self._silent_s)

    def handle(self, command: fleet_pb2.NodeCommand) -> None:
        """Carry out a command of the coordinator. What vLLM cannot do is reported as failed."""
        epoch = command.attempt.epoch
        match command.WhichOneof("command"):
            case "prefill":
                self._begin(command.prefill.job, self._prefill)
            case "reserve":
                self._reserve(command.reserve)
            case "deliver" if attempt := self._attempts.get(epoch):
                self._workers.send(send=ranks_pb2.Send(epoch=epoch, descriptor=command.deliver.descriptor))
                attempt.has_descriptor.set()
            case "keep" if attempt := self._attempts.get(epoch):
                attempt.kept.set()
            case "cancel":
                if attempt := self._attempts.get(epoch):
                    self._stop(attempt)
                self._link.send(cancelled=fleet_pb2.Cancelled(attempt=command.attempt))
            case "reshape":
                self._reshape(command)
            case "load_adapter" | "unload_adapter" as change:
                name = getattr(command, change).name
                changed = fleet_pb2.AdapterChanged(name=name, error="a node with vLLM serves no LoRA adapters")
                self._link.send(adapter_changed=changed)
            case "deliver" | "keep" | "begun":
                return  # the attempt has ended; vLLM knows no deadlines
            case other:
                self._refuse(command.attempt, f"a node with vLLM does not carry out the command {other}")

    def _reserve(self, reserve: fleet_pb2.Reserve) -> None:
        if reserve.sender_keys:
            self._workers.send(admit=ranks_pb2.Admit(keys=reserve.sender_keys))
        if reserve.num_tokens_ahead:
            self._refuse(reserve.job.attempt, "no sequence migrates to a node with vLLM")
        else:
            senders = max(1, reserve.prefill_tp_size), max(1, reserve.prefill_pp_size)
            decode = partial(self._decode, senders=senders)
            self._begin(reserve.job, self._decode_alone if reserve.local_prefill else decode)

    def detached(self) -> None:
        """End every attempt: the coordinator is gone."""
        for attempt in list(self._attempts.values()):
            self._stop(attempt)

    async def stuck(self) -> str:
        """Never return: a vLLM that gives no results is waited for by `run`, which ends the process."""
        await asyncio.Event().wait()
        raise AssertionError

    async def recovered(self) -> None:
        """Return at once: the node is never away by itself."""

    # ---- for the process ----

    async def run(self) -> None:
        """Hear vLLM's worker until cancelled. Raises RankLost when vLLM has died or gives no results."""
        await first_to_end(self._watch(), self._workers.hear(), self._follow_prefixes())

    async def _follow_prefixes(self) -> None:
        while True:
            self._prefixes.take(await self._kv_events())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self._engine.is_dead:
                raise EngineLost("vLLM's scheduler or a worker has ended")
            if self._silent_s > self._step_timeout_s:
                raise EngineLost(f"vLLM has given no result for {self._silent_s:.0f} s (--step-timeout-s)")

    def drain(self) -> None:
        """Ask for no new attempts from the next heartbeat on."""
        self.is_draining = True

    async def idle(self) -> None:
        """Return when no attempt is left."""
        await self._idle.wait()

    @property
    def is_stuck(self) -> bool:
        return self._engine.is_dead

    def take_stats(self, stats: Stats) -> None:
        """Take what vLLM reports after a step."""
        now = time.monotonic()
        step_s, self._heard_s = now - self._heard_s, now
        self._stats = stats
        if stats.num_output_tokens or stats.num_prompt_tokens:
            self._num_steps += 1
            self._num_prefill_tokens += stats.num_prompt_tokens
            num_decoding = stats.num_output_tokens if not stats.num_prompt_tokens else 0
            self._rates.add(stats.num_prompt_tokens, num_decoding, step_s)

    # ---- state ----

    @property
    def _silent_s(self) -> float:
        """Return the seconds since vLLM's last result; 0 while it has nothing to compute."""
        if not any(each.is_running for each in self._attempts.values()):
            self._heard_s = time.monotonic()
        return time.monotonic() - self._heard_s

    def _load(self) -> inference_pb2.NodeLoad:
        facts, stats = self._engine.facts, self._stats
        is_waiting = [not each.is_running for each in self._attempts.values()]
        return inference_pb2.NodeLoad(
            name=self._name,
            role=role_of(self._shape),
            shape=convert.shape_to_wire(self._shape),
            state="draining" if self.is_draining else "ready",
            num_running=stats.num_running,
            num_waiting=max(stats.num_waiting, sum(is_waiting)),
            num_waiting_tokens=sum(each.num_prefilled for each in self._attempts.values() if not each.is_running),
            num_blocks=facts.num_blocks,
            num_blocks_free=self.num_blocks_free,
            num_blocks_cached=min(len(self._prefixes), self.num_blocks_free),
            num_steps=self._num_steps,
            step_s=self._rates.decode_step_s,
            lone_step_s=self._rates.lone_step_s,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            rss_bytes=resident_bytes(),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            num_kv_bytes=self._num_kv_bytes,
            num_transfers_failed=self._num_transfers_failed,
        )

    def _reshape(self, command: fleet_pb2.NodeCommand) -> None:
        shape = convert.shape_from_wire(command.reshape.shape)
        try:
            check_shape(shape, **self._limits)
            self._check_whole(shape)
        except RequestError as error:
            self._refuse(command.attempt, str(error), error.reason)
        else:
            self._shape = shape
            if not command.reshape.is_temporary:
                self._home = shape
        self._link.send(heartbeat=self.heartbeat())

    def _check_whole(self, shape: Shape) -> None:
        """Raise RequestError unless the shape is of all or nothing: vLLM's limits do not change while it runs."""
        for name, value, most in (
            ("prompt_tokens", shape.prompt_tokens, self._limits["max_num_batched_tokens"]),
            ("slots", shape.slots, self._limits["max_num_seqs"]),
        ):
            if value not in (0, most):
                message = f"{name} of a node with vLLM is 0 or {most}, not {value}: vLLM's limits do not change"
                raise RequestError(reasons.BAD_PARAM, message)

    # ---- attempts ----

    def _begin(self, job: fleet_pb2.Job, serve: Callable[[_Attempt], Coroutine[Any, Any, None]]) -> None:
        epoch = job.attempt.epoch
        try:
            request = convert.request_from_wire(job)
            sampling_fields(request, self._eos_token_ids)  # may refuse
            if epoch in self._attempts:
                raise RequestError(reasons.DUPLICATE_REQUEST_ID, f"attempt {epoch} was announced twice")
            if len(self._attempts) >= self._max_num_queued:
                raise RequestError(reasons.QUEUE_FULL, f"the node holds its {self._max_num_queued} requests")
        except RequestError as error:
            self._refuse(job.attempt, str(error), error.reason)
            return
        attempt = self._attempts[epoch] = _Attempt(request, num_prefilled=len(request.token_ids))
        attempt.ended = asyncio.get_running_loop().create_future()
        self._idle.clear()
        attempt.task = asyncio.create_task(self._serve(attempt, serve))

    async def _serve(self, attempt: _Attempt, serve: Callable[[_Attempt], Coroutine[Any, Any, None]]) -> None:
        """Serve an attempt to its end, and report a failure."""
        try:
            await serve(attempt)
        except RequestError as error:
            self._flush()
            self._refuse(attempt.wire, str(error), error.reason)
        except TimeoutError:
            message = f"no blocks or no descriptor within {self._credit_timeout_s} or {self._descriptor_timeout_s} s"
            self._refuse(attempt.wire, message, reasons.TRANSFER_FAILED)
        except Exception as error:  # of vLLM
            logger.exception("a request failed", extra={"fields": {"request_id": attempt.request.request_id}})
            self._refuse(attempt.wire, f"vLLM: {error}", reasons.STEP_FAILED)
        finally:
            self._forget(attempt)

    def _forget(self, attempt: _Attempt) -> None:
        if self._attempts.pop(attempt.request.epoch, None) is not None:
            self._release(attempt.request.epoch)
        if not self._attempts:
            self._idle.set()

    def _release(self, epoch: int) -> None:
        """End the transfer of an attempt, if there is one, so that vLLM may free its blocks."""
        self._workers.send(cancel_transfer=ranks_pb2.CancelTransfer(epoch=epoch))

    def _stop(self, attempt: _Attempt) -> None:
        self._forget(attempt)
        if attempt.task is not None:
            attempt.task.cancel()

    def _refuse(self, wire: fleet_pb2.Attempt, message: str, reason: str = reasons.PAIRING_MISMATCH) -> None:
        self._link.send(failed=fleet_pb2.Failed(attempt=wire, reason=reason, message=message))

    # ---- the three ways to serve ----

    async def _decode_alone(self, attempt: _Attempt) -> None:
        """Prefill and decode here."""
        tell = self._tell_first
        async for output in self._generate(attempt, {}):
            tell(attempt, output)
            tell = self._tell

    async def _prefill(self, attempt: _Attempt) -> None:
        """Prefill here, for another node to decode."""
        request, is_last = attempt.request, False
        async for output in self._generate(attempt, {SEND: request.epoch}, max_tokens=1):
            is_last = output.reason is FinishReason.STOP or request.num_output_tokens == request.sampling.max_tokens
            self._tell_first(attempt, output if is_last else output._replace(reason=None))
        if is_last:
            return
        attempt.is_running = False
        tail = convert.to_tail(request.token_ids[-1:], [])
        self._workers.send(finish_send=ranks_pb2.FinishSend(epoch=request.epoch, tail=tail))
        if await self._is_kept(attempt):
            self._release(request.epoch)
            await self._decode_on(attempt)
            return
        assert attempt.ended is not None
        result = await attempt.ended
        if isinstance(result, TransferFailed):
            raise RequestError(result.reason, result.message)
        self._link.send(transferred=fleet_pb2.Transferred(attempt=attempt.wire, num_bytes=result.num_bytes))

    async def _is_kept(self, attempt: _Attempt) -> bool:
        """Wait for the descriptor and the end of the transfer, or for Keep. Raises TimeoutError without either."""
        assert attempt.ended is not None
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(attempt.has_descriptor.wait()),
            asyncio.ensure_future(attempt.kept.wait()),
        ]
        try:
            async with asyncio.timeout(self._descriptor_timeout_s):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.kept.is_set():
                ended: asyncio.Future[Any] = attempt.ended
                await asyncio.wait([ended, waits[1]], return_when=asyncio.FIRST_COMPLETED)
            return attempt.kept.is_set()
        finally:
            for each in waits:
                each.cancel()

    async def _decode(self, attempt: _Attempt, senders: tuple[int, int]) -> None:
        """Decode a prompt that a node with these tensor-parallel ranks and stages prefills."""
        request = attempt.request
        addresses = [self._workers.kv_addresses[rank] for rank in sorted(self._workers.kv_addresses)]
        transfer = {RECEIVE: request.epoch, SENDERS: senders, ADDRESSES: addresses}
        outputs = self._generate(attempt, transfer, adds=False)
        try:
            first = asyncio.ensure_future(anext(outputs))
            try:
                received = await self._received(attempt, first)
                first_id = _first_id(received.tail)
                self._tell_committed(attempt, received)
                self._note_running(attempt)
                output = await first
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)  # before the generator is closed
            request.token_ids.append(first_id)
            if output.token.token_id == first_id:
                async for output in outputs:
                    request.token_ids.append(output.token.token_id)
                    self._tell(attempt, output)
                return
        finally:
            await outputs.aclose()
        logger.info("vLLM's first token differs from the prefill node's: it goes on behind that one")
        await self._decode_on(attempt)

    async def _received(self, attempt: _Attempt, first: "asyncio.Future[Any]") -> Received:
        """Return the end of the transfer to this node. Raises RequestError if it fails or vLLM gives no blocks."""
        assert attempt.ended is not None
        credited = asyncio.ensure_future(attempt.credited.wait())
        either: list[asyncio.Future[Any]] = [attempt.ended, first]
        try:
            async with asyncio.timeout(self._credit_timeout_s):
                await asyncio.wait([credited, *either], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            message = f"vLLM had no room for the request within {self._credit_timeout_s} s"
            raise RequestError(reasons.QUEUE_FULL, message) from None
        finally:
            credited.cancel()
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not attempt.ended.done() and first.exception() is not None:
            await first  # raises why vLLM has ended the request
        result = await attempt.ended
        if isinstance(result, TransferFailed):
            if result.reason == reasons.TRANSFER_ABORTED:  # the prefill node reports why
                await asyncio.sleep(self._descriptor_timeout_s)
            raise RequestError(result.reason, result.message)
        return result

    async def _decode_on(self, attempt: _Attempt) -> None:
        """Decode behind the tokens that the request has; vLLM finds their KV in its prefix cache."""
        async for output in self._generate(attempt, {}, suffix="-on"):
            self._tell(attempt, output)

    async def _generate(
        self,
        attempt: _Attempt,
        transfer: Mapping[str, Any],
        *,
        max_tokens: int | None = None,
        suffix: str = "",
        adds: bool = True,
    ) -> AsyncGenerator[_Output]:
        """Yield the tokens that vLLM computes for an attempt. With `adds` they become the request's."""
        request, num_top = attempt.request, attempt.request.sampling.logprobs
        fields = sampling_fields(request, self._eos_token_ids)
        if max_tokens is not None:
            fields |= {"max_tokens": max_tokens, "min_tokens": min(max_tokens, fields["min_tokens"])}
        name = f"{request.request_id}-{request.epoch}{suffix}"
        self._num_prompt_tokens += len(request.token_ids)
        if RECEIVE not in transfer:
            self._note_running(attempt)
        outputs = self._engine.generate(name, list(request.token_ids), fields, transfer, request.cache_salt)
        try:
            async for each in outputs:
                reason = finish_of(each.finish_reason)
                token = token_of(each.token_id, each.logprobs, num_top)
                if adds:
                    request.token_ids.append(each.token_id)
                yield _Output(token, reason, each.prefill_s, each.num_cached_tokens)
        finally:
            await outputs.aclose()

    def _note_running(self, attempt: _Attempt) -> None:
        """Note that vLLM computes for an attempt from now on."""
        if not any(each.is_running for each in self._attempts.values()):
            self._heard_s = time.monotonic()
        attempt.is_running = True

    # ---- reports ----

    def _report_prefixes(self) -> None:
        """Report the changes of vLLM's prefix cache, before the client can send its next request."""
        if (changed := self._prefixes.changes()) is not None:
            self._link.send(cache_changed=changed)

    def _tell_first(self, attempt: _Attempt, output: _Output) -> None:
        self._report_prefixes()
        num_cached = output.num_cached_tokens
        self._num_cached_tokens += num_cached
        first = fleet_pb2.FirstToken(attempt=attempt.wire, prefill_s=output.prefill_s, num_cached_tokens=num_cached)
        convert.fill_token(first.token, attempt.request, output.token, output.reason)
        self._link.send(first_token=first)

    def _tell_committed(self, attempt: _Attempt, received: Received) -> None:
        self._num_kv_bytes += received.num_bytes
        index = attempt.request.num_output_tokens + 1
        committed = fleet_pb2.Committed(
            attempt=attempt.wire,
            num_bytes=received.num_bytes,
            num_bytes_saved=attempt.num_bytes_saved,
            next_index=index,
        )
        self._link.send(committed=committed)

    def _tell(self, attempt: _Attempt, output: _Output) -> None:
        """Report a token, in one message with those of the same step."""
        if self._tokens is None:
            self._tokens = fleet_pb2.StepTokens(step_s=self._rates.decode_step_s)
            asyncio.get_running_loop().call_soon(self._flush)
        convert.add_token(self._tokens, attempt.request, output.token, output.reason)

    def _flush(self) -> None:
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            self._link.send(step_tokens=tokens)

    # ---- transfers ----

    def _take_event(self, rank: int, event: ranks_pb2.RankEvent) -> None:
        """Take what a worker reports of a transfer, which counts when all of them have reported it."""
        if event.HasField("credited"):
            self._take_credit(event.credited)
            return
        ended = event.transfer_ended
        attempt = self._attempts.get(ended.epoch)
        if attempt is None or attempt.ended is None or attempt.ended.done():
            return
        attempt.results.append(_result(ended))
        if len(attempt.results) == len(self._workers):
            result = combined(attempt.results)
            attempt.ended.set_result(result)
            self._num_transfers_failed += (
                isinstance(result, TransferFailed) and result.reason != reasons.TRANSFER_ABORTED
            )
        elif not ended.ok:
            self._release(ended.epoch)  # the other workers' parts of it

    def _take_credit(self, credited: ranks_pb2.Credited) -> None:
        attempt = self._attempts.get(credited.epoch)
        if attempt is None:
            self._release(credited.epoch)  # it ended before vLLM had allocated its blocks
            return
        attempt.num_credits += 1
        if attempt.num_credits == len(self._workers):
            attempt.credited.set()
            attempt.num_bytes_saved = _num_bytes_saved(credited.descriptor)
            self._link.send(reserved=fleet_pb2.Reserved(attempt=attempt.wire, descriptor=credited.descriptor))


def _result(ended: ranks_pb2.TransferEnded) -> Received | TransferFailed:
    return Received(ended.tail, ended.num_bytes) if ended.ok else TransferFailed(ended.reason, ended.message)


def _first_id(tail: bytes) -> int:
    """Return the first output token of a prompt, which comes behind its KV. Raises RequestError for anything else."""
    try:
        (first_id,), _ = convert.from_tail(tail)
    except ValueError as error:
        raise RequestError(reasons.TRANSFER_FAILED, f"what follows a prompt's KV is not one token: {error}") from error
    return first_id


def _num_bytes_saved(descriptor: bytes) -> int:
    decoded = TransferDescriptor.decode(descriptor)
    return decoded.num_cached_blocks * decoded.layout.block_bytes
