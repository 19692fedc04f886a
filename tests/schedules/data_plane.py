"""The data plane between simulated processes: the transport of KV transfers (kv_transfer/transports/transport.py).

Whole messages come late and are lost with their connection. Where there is noise they are also dropped, doubled,
overtaken or changed, none of which a KV transfer may trust its transport with.
"""

from kv_transfer.payload import HOST, Payload


class DataListener:
    """A Listener of KV transfers: see kv_transfer/transports/transport.py."""

    payload: Payload = HOST
    num_shared_bytes = 0

    def __init__(self, network, address):
        self.address = address
        self.process = network.loop.current
        self.allowed = set()

    def allow(self, keys):
        new = [key for key in keys if key not in self.allowed]
        self.allowed.update(new)
        return new

    def start(self, on_message):
        self.take = on_message

    def reply(self, peer, header):
        assert isinstance(peer, DataConnection)
        peer.reply(header)

    async def close(self):
        """Nobody closes it: processes die."""


class DataDialer:
    """A Dialer of KV transfers."""

    payload: Payload = HOST
    num_shared_bytes = 0

    def __init__(self, network):
        self.process = network.loop.current
        self.key = network.random.randbytes(32)
        self._network = network
        self._connections = {}

    def start(self, on_reply, on_lost):
        self.take_reply, self._on_lost = on_reply, on_lost

    def connect(self, address):
        self._connection(address)

    def send(self, address, header, frames=()):
        released = self._network.loop.create_future()
        if connection := self._connection(address):
            connection.send(header, frames, released)
        else:
            released.set_result(None)
        return released

    def hang_up(self, address):
        if connection := self._connections.get(address):
            connection.fail()

    async def close(self):
        """Nobody closes it: processes die."""

    def lost(self, address, connection):
        """A connection broke, or could not be made."""
        if self._connections.get(address) is connection:
            self._connections.pop(address, None)
        self._on_lost(address)

    def _connection(self, address):
        connection = self._connections.get(address)
        if connection is None:
            connection = self._network.connect(self, address)
            if connection is None:
                loop = self._network.loop
                loop.plan(self.process, loop.now + self._network.delay_s(), self.lost, address, None)
            else:
                self._connections[address] = connection
        return connection


class DataConnection:
    """One connection of the data plane."""

    def __init__(self, network, dialer, listener):
        self.ends = (dialer.process, listener.process)
        self._network, self._dialer, self._listener = network, dialer, listener
        self._is_broken = False
        self._left_s = self._there_s = self._back_s = 0.0  # of the last message: when it left, came, and of a reply
        self._held = {}

    @property
    def names(self):
        return [each.name for each in self.ends]

    def joins(self, one, other):
        return {one, other} == set(self.names)

    def fail(self):
        """It breaks, and what is under way is lost."""
        if self._is_broken:
            return
        self._is_broken = True
        loop = self._network.loop
        loop.plan(self.ends[0], loop.now + self._network.delay_s(), self._lost)
        self._network.forget(self)

    def send(self, header, frames, released):
        """The frames are read when the message leaves, not before."""
        network = self._network
        self._left_s = network.arrival_s(self.ends[0].name, self.ends[1].name, self._left_s)
        self._held[released] = None
        network.loop.plan(self.ends[0], self._left_s, self._leave, header, frames, released)

    def reply(self, header):
        network, noise = self._network, self._network.noise
        if self._is_broken or network.random.random() < noise.dropped:
            return
        self._back_s = network.arrival_s(self.ends[1].name, self.ends[0].name, self._back_s)
        header, _ = self._changed(header, [])
        network.loop.plan(self.ends[0], self._back_s, self._take_reply, header)

    def _leave(self, header, frames, released):
        if self._held.pop(released, self) is self:
            return  # lost, and released, before
        copies = [bytes(frame) for frame in frames]
        released.set_result(None)
        network, noise, random = self._network, self._network.noise, self._network.random
        if random.random() < noise.dropped:
            return
        for _ in range(2 if random.random() < noise.doubled else 1):
            arrives_s = network.arrival_s(self.ends[0].name, self.ends[1].name, self._there_s)
            if random.random() < noise.overtaken:
                arrives_s += 10 * network.delay_s()
            else:
                self._there_s = arrives_s
            network.loop.plan(self.ends[1], arrives_s, self._arrive, *self._changed(header, copies))

    def _changed(self, header, frames):
        """The message with a bit of it flipped, if there is noise."""
        random = self._network.random
        if random.random() >= self._network.noise.changed:
            return header, frames
        parts = [header, *frames]
        index = random.randrange(len(parts)) if random.random() < 0.3 else len(parts) - 1
        changed = bytearray(parts[index])
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        parts[index] = bytes(changed)
        return parts[0], parts[1:]

    def _arrive(self, header, frames):
        if not self._is_broken and self._dialer.key in self._listener.allowed:
            self._listener.take(self, memoryview(header), [memoryview(frame) for frame in frames])

    def _take_reply(self, header):
        if not self._is_broken:
            self._dialer.take_reply(memoryview(header))

    def _lost(self):
        held, self._held = self._held, {}
        for released in held:
            released.set_result(None)
        self._dialer.lost(self._listener.address, self)
