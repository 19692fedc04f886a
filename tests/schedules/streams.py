"""The control plane between simulated processes: one stream a node, as gRPC has it.

Messages come late, in order, until the stream breaks, which may lose its tail; each end hears of that by itself. Where
the schedule spoils one (Network.spoil), the stream lives on without a word.
"""

import asyncio

import grpc

from protos import fleet_pb2

METHOD = "/splitserve.v1.Fleet/Attach"


class _Direction:
    """One direction of a stream. What has come waits to be read."""

    def __init__(self, network, source, target):
        self.arrived = asyncio.Queue()
        self.is_broken = False
        self._network, self._source, self._target = network, source, target
        self._overtaken = []  # a message, by the next one
        self.last_s = 0.0

    def send(self, message):
        source, target = self._source.name, self._target.name
        how = None if message is grpc.aio.EOF else self._network.spoiling(source, target)
        if how == "overtaken" and not self._overtaken:
            self._overtaken.append(message)
            return
        if how == "lost":
            return
        for each in (message, *self._overtaken, *([message] if how == "doubled" else [])):
            self.last_s = self._network.arrival_s(source, target, self.last_s)
            self._network.loop.plan(self._target, self.last_s, self._arrive, each)
        self._overtaken.clear()

    def fail(self, error):
        """What is under way is lost; the reader hears of it a little later."""
        self.is_broken = True
        network = self._network
        network.loop.plan(self._target, network.loop.now + network.delay_s(), self.arrived.put_nowait, error)

    def _arrive(self, message):
        if not self.is_broken:
            self.arrived.put_nowait(message)


class Stream:
    """One call of Fleet.Attach: `self` is what the node has of it, `_Context` what the coordinator's handler gets."""

    def __init__(self, network, node, coordinator, handler):
        self.ends = (node, coordinator)
        self._network, self._node, self._coordinator = network, node, coordinator
        self.up, self.down = _Direction(network, node, coordinator), _Direction(network, coordinator, node)
        self._error = None
        self._served = None
        if handler is None or coordinator.is_dead:
            self.fail()
        else:
            accepted_s = network.arrival_s(node.name, coordinator.name)
            network.loop.plan(coordinator, accepted_s, self._accept, handler)

    def joins(self, one, other):
        return {one, other} == {each.name for each in self.ends}

    def fail(self):
        """It breaks: both ends hear of it, each in its time."""
        network, loop = self._network, self._network.loop
        self.up.is_broken = True
        self.down.fail(_unavailable("the connection broke"))
        loop.plan(self._coordinator, loop.now + network.delay_s(), self._cancel_handler)
        network.forget(self)

    # ---- the node's end, as grpc.aio has it ----

    async def write(self, event):
        if self._error is not None:
            raise self._error
        if self._network.traces:
            self._network.note(f"{self._node.name} -> {_short(event)}")
        self.up.send(event.SerializeToString())

    async def read(self):
        if self._error is not None:
            raise self._error
        message = await self.down.arrived.get()
        if isinstance(message, Exception):
            self._error = message
            raise message
        if message is grpc.aio.EOF:
            self._error = _unavailable("the stream has ended")
            return message
        command = fleet_pb2.NodeCommand.FromString(message)
        if self._network.traces:
            self._network.note(f"{self._node.name} <- {_short(command)}")
        return command

    def cancel(self):
        """The node hangs up: the coordinator hears that after what was sent before."""
        network = self._network
        hears_s = network.arrival_s(self._node.name, self._coordinator.name, self.up.last_s)
        network.loop.plan(self._coordinator, hears_s, self._cancel_handler)

    # ---- the coordinator's end ----

    def _accept(self, handler):
        if not self.up.is_broken:
            self._network.num_streams += 1
            self._served = self._network.loop.create_task(self._serve(handler))

    async def _serve(self, handler):
        try:
            await handler(None, _Context(self))
        except grpc.aio.AbortError:
            pass  # the status is on its way
        else:
            self.down.send(grpc.aio.EOF)

    def _cancel_handler(self):
        self.up.is_broken = True
        self._network.forget(self)
        if self._served is not None:
            self._served.cancel()


class _Context:
    """What a handler is given of a stream."""

    def __init__(self, stream):
        self._stream = stream

    async def read(self):
        return await self._stream.up.arrived.get()

    async def write(self, command):
        self._stream.down.send(command.SerializeToString())

    async def abort(self, code, details, metadata):
        self._stream.down.send(_status(code, details))
        raise grpc.aio.AbortError


class Channel:
    """In place of grpc.aio.insecure_channel, and of the stub over it."""

    def __init__(self, address, *, options):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *failure):
        pass

    def Attach(self, *, metadata):
        return asyncio.get_running_loop().network.dial()


def _unavailable(details):
    return _status(grpc.StatusCode.UNAVAILABLE, details)


def _status(code, details):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def _short(message):
    """A command or an event in a line."""
    kind = message.WhichOneof("event" if isinstance(message, fleet_pb2.NodeEvent) else "command")
    body = getattr(message, kind)
    if kind == "step_tokens":
        tokens = [f"{each.attempt.request_id}@{each.attempt.epoch}[{each.index}]" for each in body.tokens]
        tokens += [f"@{epoch}[{index}]" for epoch, index in zip(body.epochs, body.indexes, strict=True)]
        return f"step_tokens {' '.join(tokens)}"
    about = body.job.attempt if kind in ("reserve", "prefill") else getattr(body, "attempt", None)
    more = f" {body.reason}: {body.message}" if kind in ("failed", "migration_failed", "refusal") else ""
    return f"{kind} {about.request_id}@{about.epoch}{more}" if about is not None else f"{kind}{more}"
