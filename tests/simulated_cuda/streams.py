"""Streams and events of the simulated device. All is done at once, but for copies to the host that are not to be
awaited: those are done when somebody waits.

What a device may do at the same time is an error here where it must not. A stream knows what has been done in it, and
in others it has waited for; the host knows what it has awaited. Whatever is read must be known to have been written,
and whatever is written to be read by nobody any more. Of threads it is taken that each knows what another one does.
"""

import threading
import weakref


class Waiting(threading.local):
    """What becomes of operations that make the host wait, in this thread."""

    is_error = False  # of torch.cuda.set_sync_debug_mode
    capture = None  # the graph that is captured, a list of what was done


waiting = Waiting()


def may_not_capture(what):
    if waiting.capture is not None:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


class Clock(dict):
    """How much of each stream is over, by the stream's number."""

    def learn(self, other):
        for number, count in other.items():
            self[number] = max(count, self.get(number, 0))

    def knows(self, moment):
        number, count = moment
        return self.get(number, 0) >= count


host = Clock()
streams = weakref.WeakSet()
running = threading.local()  # its `stream` is the thread's current one
changing = threading.RLock()


def host_learns(clock):
    """It waits, if need be until who sleeps wakes up."""
    host.learn(clock)
    for stream in list(streams):
        stream.copy_what_is_over()
        if stream.sleeps_before(clock):
            stream.sleeps = None


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.clock = Clock()

    def record(self, stream=None):
        assert stream is None or isinstance(stream, Stream)
        self.clock = Clock((stream or current_stream()).clock)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def query(self):
        may_not_capture("Event.query")
        if any(each.sleeps_before(self.clock) for each in list(streams)):
            return False
        self.synchronize()
        return True

    def synchronize(self):
        may_not_capture("Event.synchronize")
        with changing:
            host_learns(self.clock)


class Stream:
    numbers = iter(range(10**9))

    def __init__(self, device=None, priority=0):
        self.number, self.clock, self.copies = next(self.numbers), Clock(), []
        self.sleeps = None  # the moment when it fell asleep
        streams.add(self)

    def begin(self):
        """Something more is done here, of which it gives the moment."""
        self.clock.learn(host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.number, self.clock[self.number]

    def sleeps_before(self, clock):
        return self.sleeps is not None and clock.knows(self.sleeps)

    def copy_later(self, copy):
        self.copies.append((self.begin(), copy))

    def copy_what_is_over(self):
        while self.copies and host.knows(self.copies[0][0]):
            self.copies.pop(0)[1]()

    def wait_stream(self, other):
        with changing:
            self.clock.learn(other.clock)

    def wait_event(self, event):
        with changing:
            self.clock.learn(event.clock)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return self.record_event().query()

    def synchronize(self):
        may_not_capture("Stream.synchronize")
        with changing:
            host_learns(self.clock)


DEFAULT_STREAM = Stream()


def default_stream(device=None):
    return DEFAULT_STREAM


def current_stream(device=None):
    return getattr(running, "stream", DEFAULT_STREAM)


def set_stream(stream):
    running.stream = stream


class stream:  # it is torch's
    """For a while the thread's current one."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before = current_stream()
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *error):
        set_stream(self.before)


def synchronize(device=None):
    may_not_capture("synchronize")
    for each in list(streams):
        each.synchronize()


def _sleep(cycles):
    """The current stream does nothing more, until the host waits for it."""
    with changing:
        current_stream().sleeps = current_stream().begin()
