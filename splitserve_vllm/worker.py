"""Run the KV transfers of one worker of vLLM, beside its steps. Imports no vLLM.

A worker obeys its node as a follower obeys rank 0 (protos/ranks.proto). Transfers run on an event loop in a thread of
their own; vLLM's thread reports the steps and the layers.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from kv_transfer.descriptor import TransferDescriptor, endpoint_of
from kv_transfer.receiver import KVReceiver
from kv_transfer.results import Received, Sent, TransferError, TransferFailed
from kv_transfer.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from kv_transfer.transports.zmq_keys import Keyring
from protos import inference_pb2, ranks_pb2
from serving_core import reasons
from serving_core.errors import RankLost, SettingsError
from serving_core.layout import KVLayout
from serving_core.net.descriptors import kept_spares
from serving_core.tasks import first_to_end
from serving_node.ranks.leading import Leader, die
from serving_node.ranks.transfers import RankTransfers
from splitserve_vllm.scheduling import Load, StepTransfers
from splitserve_vllm.store import VllmStore

logger = logging.getLogger(__name__)

START_DEADLINE_S: Final = 60.0
CLOSE_DEADLINE_S: Final = 20.0


@dataclass(slots=True)
class _Outgoing:
    """A prompt that another node decodes. Known from its first chunk or from its descriptor on."""

    block_ids: list[int] = field(default_factory=list)  # final ones
    tail: bytes | None = None  # once the first token is sampled
    request_id: str = ""  # of vLLM, once it has finished and holds the blocks
    is_released: bool = False
    is_sending: bool = False
    next_descriptor: bytes = b""  # which has come while a transfer by a void one is ending
    timer: asyncio.TimerHandle | None = None  # of the end of the time that its blocks are kept

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the timer by this one."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer


@dataclass(slots=True)
class Results:
    """The requests of vLLM whose transfers have ended."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # which are among `received`


class Worker:
    """A worker's side: an event loop in a thread runs the transfers; vLLM's thread reports steps and layers."""

    def __init__(
        self, store: VllmStore, config: dict[str, Any], whole: KVLayout, rank: int = 0, tp_size: int = 1
    ) -> None:
        """Start the thread and connect to the node. Raises SettingsError if that fails.

        `store` has the KV heads of one tensor-parallel rank, `whole` is the layout of all heads.
        """
        self._store, self._config, self._whole = store, config, whole
        self._rank, self._tp_size = rank, tp_size
        self._step = StepTransfers()
        self._transfers: WorkerTransfers | None = None
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._why: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="splitserve-kv", daemon=True)
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S) or self._why is not None:
            raise SettingsError(f"the data plane of a worker does not start: {self._why or 'no answer'}")

    # ---- vLLM's thread ----

    def begin_step(self, step: StepTransfers) -> None:
        """Take what the scheduler tells of a step, before the step computes."""
        self._step = step
        if step.loads or step.chunks or step.held or step.dropped:
            self._call(lambda transfers: transfers.begin_step(step))

    def layer_done(self, layer_name: str) -> None:
        """Note that a layer of the step is computed."""
        transfers = self._transfers
        if self._step.chunks and transfers is not None and transfers.num_sending:
            step, num_layers = self._step, self._store.indices[layer_name] + 1
            self._call(lambda transfers: transfers.layers_done(step, num_layers), self._store.computed())

    def end_step(self) -> None:
        """Note that all layers of the step are computed."""
        step, self._step = self._step, StepTransfers()
        if step.chunks:
            self._call(lambda transfers: transfers.end_step(step), self._store.computed())

    def take_results(self) -> "Results":
        """Return the requests whose transfers have ended since the last call."""
        return Results() if self._transfers is None else self._transfers.take_results()

    def close(self) -> None:
        if self._stop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=CLOSE_DEADLINE_S)

    def _call(self, call: Callable[["WorkerTransfers"], None], wait: Callable[[], None] = lambda: None) -> None:
        """Call in the thread of transfers, once `wait` has returned there."""

        def called() -> None:
            if self._transfers is not None:
                wait()
                call(self._transfers)

        self._loop.call_soon_threadsafe(called)

    # ---- the thread of transfers ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except RankLost as error:
            die(error)
        except BaseException as error:  # told to vLLM's thread if it still waits, else to the log
            self._why = error
            if self._started.is_set():
                logger.exception("the thread of KV transfers has ended")
                die(error)
        finally:
            self._transfers = None
            self._loop.close()
            self._started.set()

    async def _serve(self) -> None:
        config = self._config
        self._stop = asyncio.Event()
        keyring, shares_memory = Keyring(), config["kv_shared_memory"]
        async with kept_spares() as spares, AsyncExitStack() as open_ends:
            listener = ZmqListener(
                endpoint_of("zmq", config["kv_bind"], self._rank),
                keyring if config["is_encrypted"] else None,
                shares_memory=shares_memory,
            )
            place = {"rank": self._rank, "tp_size": self._tp_size}
            receiver = KVReceiver(listener, self._store, **place)
            open_ends.push_async_callback(receiver.close)
            dialer = ZmqDialer(keyring, spares, shares_memory=shares_memory)
            sender = KVSender(dialer, self._store, **place, deadline_s=config["transfer_timeout_s"])
            open_ends.push_async_callback(sender.close)
            meeting = bytes.fromhex(config["meeting"])
            load = inference_pb2.RankLoad(rank=self._rank + 1)
            leader = await Leader.join(lambda _: [meeting], receiver.address, dialer.key, load)
            open_ends.callback(leader.stream.close)
            times = {"ttl_s": config["reservation_ttl_s"], "hold_s": config["hold_s"]}
            secret = bytes.fromhex(config["secret"])
            transfers = WorkerTransfers(sender, receiver, leader, self._whole, secret, **times)
            self._transfers = transfers
            self._started.set()
            stopped: Coroutine[Any, Any, Any] = self._stop.wait()
            await first_to_end(stopped, _obey(leader, transfers), leader.report_load())


async def _obey(leader: Leader, transfers: "WorkerTransfers") -> None:
    while True:
        transfers.obey(await leader.command())


class WorkerTransfers(RankTransfers):
    """The transfers of one worker, by epoch. All methods but those that take results are called on its event loop."""

    def __init__(
        self,
        sender: KVSender,
        receiver: KVReceiver,
        leader: Leader,
        whole: KVLayout,
        secret: bytes,
        *,
        ttl_s: float,
        hold_s: float,
    ) -> None:
        """Create the transfers. Blocks stay open to a sender for `ttl_s` seconds; those of a finished prompt are kept
        for `hold_s` seconds at most.

        All workers of a node have the same `whole` layout and the same `secret`, so that they make the same descriptor.
        """
        super().__init__(sender, receiver, 0)
        self._leader, self._whole, self._secret = leader, whole, secret
        self._ttl_s, self._hold_s = ttl_s, hold_s
        self._outgoing: dict[int, _Outgoing] = {}
        self._loads: dict[int, Load] = {}
        self._num_opened = 0
        self._descriptor = b""  # of the blocks that are being opened
        self._lock = threading.Lock()  # of the results that vLLM's thread takes
        self._results = Results()

    @property
    def num_sending(self) -> int:
        """Return the number of transfers from this worker that are under way."""
        return len(self._sending)

    # ---- results, taken by vLLM's thread ----

    def take_results(self) -> Results:
        with self._lock:
            taken, self._results = self._results, Results()
        return taken

    # ---- steps ----

    def begin_step(self, step: StepTransfers) -> None:
        """Open the blocks of loads, and let go of requests that have ended."""
        for epoch in step.dropped:
            self._drop(epoch)
        for request_id, epoch in step.held.items():
            self._hold(epoch, request_id)
        for load in step.loads:
            self._open(load)

    def layers_done(self, step: StepTransfers, num_layers: int) -> None:
        """Send the final blocks of the leading layers of a step that still computes."""
        for chunk in step.chunks:
            self._ready(chunk.epoch, chunk.block_ids, num_layers)

    def end_step(self, step: StepTransfers) -> None:
        """Send the final blocks of a step."""
        for chunk in step.chunks:
            self._outgoing.setdefault(chunk.epoch, _Outgoing()).block_ids = chunk.block_ids
            self._ready(chunk.epoch, chunk.block_ids)
            self._finish_if_done(chunk.epoch)

    def _open(self, load: Load) -> None:
        self._loads[load.epoch] = load
        self._num_opened += 1
        try:
            descriptor = TransferDescriptor.draw(
                epoch=load.epoch,
                layout=self._whole,
                prefill_tp=load.prefill_tp,
                prefill_pp=load.prefill_pp,
                decode_tp=len(load.addresses),
                addresses=load.addresses,
                secret=self._secret + self._num_opened.to_bytes(8, "big"),
                num_blocks=len(load.block_ids),
                num_cached_blocks=load.num_cached_blocks,
                num_tokens=load.num_tokens,
                ttl_s=self._ttl_s,
            )
        except TransferError as error:
            self._received(load.epoch, TransferFailed(reasons.TRANSFER_FAILED, str(error)))
            return
        self._descriptor = descriptor.encode()
        self._expect(descriptor, load.block_ids)

    def _hold(self, epoch: int, request_id: str) -> None:
        outgoing = self._outgoing.setdefault(epoch, _Outgoing())
        outgoing.request_id = request_id
        if outgoing.is_released:
            self._let_go(epoch)
        else:
            self._set_timer(epoch, outgoing)

    def _set_timer(self, epoch: int, outgoing: _Outgoing) -> None:
        """Let the blocks of a finished prompt be kept for `hold_s` seconds from now on."""
        if outgoing.request_id:
            outgoing.set_timer(asyncio.get_running_loop().call_later(self._hold_s, self._expire, epoch))

    # ---- the node's commands ----

    def obey(self, command: ranks_pb2.RankCommand) -> None:
        """Carry out a command of the node."""
        match command.WhichOneof("command"):
            case "send":
                self._begin(command.send.epoch, command.send.descriptor)
            case "finish_send":
                self._outgoing.setdefault(command.finish_send.epoch, _Outgoing()).tail = command.finish_send.tail
                self._finish_if_done(command.finish_send.epoch)
            case "cancel_transfer":
                self._receiver.cancel(command.cancel_transfer.epoch)
                self._release(command.cancel_transfer.epoch)
            case "admit":
                self._receiver.transport.allow(command.admit.keys)

    def _begin(self, epoch: int, descriptor: bytes) -> None:
        outgoing = self._outgoing.setdefault(epoch, _Outgoing())
        if outgoing.is_sending:  # by the descriptor of a credit that the decode node is revoking
            outgoing.next_descriptor = descriptor
            return
        outgoing.is_sending = True
        self._set_timer(epoch, outgoing)
        self._start(epoch, descriptor)
        self._ready(epoch, outgoing.block_ids)
        self._finish_if_done(epoch)

    def _finish_if_done(self, epoch: int) -> None:
        """Finish a transfer whose descriptor, blocks and tail are all here."""
        outgoing = self._outgoing.get(epoch)
        if outgoing is not None and outgoing.is_sending and outgoing.block_ids and outgoing.tail is not None:
            self._finish(epoch, outgoing.block_ids, outgoing.tail)

    def _release(self, epoch: int) -> None:
        """Let vLLM free the blocks of a prompt, now or when it finishes; a transfer under way ends."""
        if (outgoing := self._outgoing.get(epoch)) is None:
            return
        outgoing.is_released = True
        if outgoing.is_sending:
            self._cancel_sending(epoch)  # _sent follows
        elif outgoing.request_id:
            self._let_go(epoch)

    def _drop(self, epoch: int) -> None:
        """Forget a prompt whose blocks vLLM has freed."""
        if (outgoing := self._outgoing.pop(epoch, None)) is not None:
            outgoing.set_timer(None)
            self._cancel_sending(epoch)

    def _let_go(self, epoch: int) -> None:
        outgoing = self._outgoing.pop(epoch)
        outgoing.set_timer(None)
        with self._lock:
            self._results.sent.add(outgoing.request_id)

    # ---- reports of transfers ----

    def _opened(self, epoch: int) -> None:
        self._leader.send(credited=ranks_pb2.Credited(epoch=epoch, descriptor=self._descriptor))

    def _receiving(self, epoch: int) -> None:
        """Do nothing: vLLM does not preempt a request that waits for its blocks."""

    def _caught_up(self, epoch: int) -> None:
        """Do nothing: no request migrates."""

    def _received(self, epoch: int, result: Received | TransferFailed) -> None:
        load = self._loads.pop(epoch)
        with self._lock:
            if isinstance(result, TransferFailed):
                self._results.failed.add(load.request_id)
            self._results.received.add(load.request_id)
        self._tell_end(epoch, result, result.tail if isinstance(result, Received) else b"")

    def _sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        if outgoing := self._outgoing.get(epoch):
            outgoing.is_sending = False
            is_revoked = isinstance(result, TransferFailed) and result.reason == reasons.TRANSFER_REVOKED
            if is_revoked and not outgoing.is_released:
                self._await_descriptor(epoch, outgoing)
                return
            outgoing.is_released = True
            if outgoing.request_id:
                self._let_go(epoch)
        self._tell_end(epoch, result, b"")

    def _await_descriptor(self, epoch: int, outgoing: _Outgoing) -> None:
        """Send a prompt, whose credit the decode node has revoked, by its next descriptor once that is here."""
        descriptor, outgoing.next_descriptor = outgoing.next_descriptor, b""
        if descriptor:
            self._begin(epoch, descriptor)
        else:
            self._set_timer(epoch, outgoing)

    def _expire(self, epoch: int) -> None:
        """Let go of a prompt that was kept for too long."""
        is_waiting = not self._outgoing[epoch].is_sending
        self._release(epoch)
        if is_waiting:
            message = f"no descriptor came within {self._hold_s:g} s"
            self._tell_end(epoch, TransferFailed(reasons.TRANSFER_FAILED, message), b"")

    def _tell_end(self, epoch: int, result: Sent | Received | TransferFailed, tail: bytes) -> None:
        if isinstance(result, TransferFailed):
            ended = ranks_pb2.TransferEnded(epoch=epoch, reason=result.reason, message=result.message)
        else:
            ended = ranks_pb2.TransferEnded(epoch=epoch, ok=True, num_bytes=result.num_bytes, tail=tail)
        self._leader.send(transfer_ended=ended)
