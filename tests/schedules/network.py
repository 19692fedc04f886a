"""The network between simulated processes: how long messages take, and what befalls connections.

Between two machines each direction can be blocked for a while: what is sent meanwhile comes afterwards, unless a
connection has given up before.
"""

from dataclasses import dataclass

from tests.schedules.data_plane import DataConnection, DataDialer, DataListener
from tests.schedules.processes import Process
from tests.schedules.streams import Stream

COORDINATOR = "coordinator"
GIVES_UP_S = 30.0  # a node's stream of which one direction is blocked, as gRPC's keepalive does
DATA_GIVES_UP_S = 4.0  # a connection of the data plane likewise


@dataclass(slots=True)
class Noise:
    """How often a message of the data plane fares so."""

    dropped: float = 0.0
    doubled: float = 0.0
    overtaken: float = 0.0
    changed: float = 0.0


class Network:
    """All connections, and what they go through."""

    def __init__(self, loop, random, note):
        self.loop, self.random, self.note = loop, random, note
        self.noise = Noise()
        self.traces = False  # whether every message is noted
        self.num_streams = 0  # that coordinators have ever taken
        self._most_s = random.choice([0.0005, 0.003, 0.02])
        self._blocked_until_s = {}
        self._spoils = {}
        self._server = None
        self._streams = []
        self._listeners = {}
        self._connections = []

    # ---- time ----

    def delay_s(self):
        """Of one message."""
        spike = 20 if self.random.random() < 0.02 else 1
        return self.random.random() * self._most_s * spike

    def arrival_s(self, source, target, last_s=0.0):
        """When comes what is sent now, after what was sent before."""
        return max(last_s, self.loop.now + self.delay_s(), self._blocked_until_s.get((source, target), 0.0))

    # ---- trouble ----

    def block(self, source, target, seconds):
        """Nothing comes this way for so long."""
        until_s = self.loop.now + seconds
        self._blocked_until_s[source, target] = max(until_s, self._blocked_until_s.get((source, target), 0.0))
        gives_up_s = GIVES_UP_S if COORDINATOR in (source, target) else DATA_GIVES_UP_S
        if seconds > gives_up_s:
            self.loop.plan(self.loop.outside, self.loop.now + gives_up_s, self.reset, source, target)

    def spoil(self, source, target, how):
        """The next message of the control plane that goes this way is lost, doubled or overtaken by the one behind."""
        self._spoils[source, target] = how

    def spoiling(self, source, target):
        """Return how the message that is sent now fares, once; None as a rule."""
        return self._spoils.pop((source, target), None)

    def reset(self, one, other):
        """The connections between these two break."""
        self._break([each for each in (*self._streams, *self._connections) if each.joins(one, other)])

    def lose(self, process):
        """A process has died, and its connections break."""
        if self._server is not None and self._server[0] is process:
            self._server = None
        for address in [key for key, each in self._listeners.items() if each.process is process]:
            del self._listeners[address]
        self._break([each for each in (*self._streams, *self._connections) if process in each.ends])

    def _break(self, connections):
        for each in connections:
            each.fail()

    # ---- control plane ----

    def serve(self, process, handler):
        """The process takes the nodes' streams from now on."""
        self._server = process, handler

    def dial(self):
        """A stream of the current process to the coordinator. One that cannot be made fails a little later."""
        process, handler = self._server or (Process(COORDINATOR, is_dead=True), None)
        stream = Stream(self, self.loop.current, process, handler)
        self._streams.append(stream)
        return stream

    def forget(self, connection):
        """It is over."""
        for connections in (self._streams, self._connections):
            if connection in connections:
                connections.remove(connection)

    # ---- data plane ----

    def listener(self, address):
        """Of the current process."""
        self._listeners[address] = listener = DataListener(self, address)
        return listener

    def dialer(self):
        """Of the current process."""
        return DataDialer(self)

    def connect(self, dialer, address):
        """None where nobody listens. One that the listener has not been told of is cut off."""
        listener = self._listeners.get(address)
        if listener is None:
            return None
        connection = DataConnection(self, dialer, listener)
        self._connections.append(connection)
        if dialer.key not in listener.allowed:
            self.loop.plan(self.loop.outside, self.arrival_s(*connection.names), connection.fail)
        return connection
