"""What a simulated device has in use, and when it was used last.

Caches of a KV pool are left out of the latter: two streams may use blocks of one pool, which are not told apart; and so
is what a graph was captured with.
"""

import threading

import torch

from tests.simulated_cuda.streams import Clock, changing, current_stream, host, waiting

allocated = {}  # Memory, by its address
races = []  # of memory that went too early: nobody can be told where it goes
counting = threading.RLock()  # which a tensor that goes may need while another one comes


class Memory:
    """One storage."""

    def __init__(self, host_tensor):
        self.num_bytes, self.num_tensors = host_tensor.untyped_storage().nbytes(), 0
        is_caches = host_tensor.dtype == torch.uint8 and host_tensor.ndim == 3
        self.is_followed = not is_caches and waiting.capture is None
        self.stream = current_stream()  # which may use it anew as soon as it goes
        self.also_of = set()  # numbers of streams that are awaited before
        self.written, self.used = Clock(), Clock()

    def use(self, stream, moment, *, writes):
        """Raises RuntimeError where another stream may be using it."""
        if not self.is_followed:
            return
        before = self.used if writes else self.written
        if any(not stream.clock.knows(each) for each in before.items()):
            raise RuntimeError(f"{'written' if writes else 'read'} beside another stream, which was not awaited")
        if writes:
            self.written = Clock([moment])
        self.used.learn(Clock([moment]))

    def go(self):
        others = [each for each in self.used.items() if each[0] != self.stream.number and each[0] not in self.also_of]
        if self.is_followed and any(not self.stream.clock.knows(each) and not host.knows(each) for each in others):
            races.append("memory was let go while another stream may be using it")


class Held:
    """One tensor's share in its storage."""

    def __init__(self, host_tensor):
        self.address = host_tensor.untyped_storage().data_ptr()
        with counting:
            if self.address not in allocated:
                allocated[self.address] = Memory(host_tensor)
            allocated[self.address].num_tensors += 1

    @property
    def memory(self):
        return allocated[self.address]

    def __del__(self):
        with counting:
            self.memory.num_tensors -= 1
            if not self.memory.num_tensors:
                allocated.pop(self.address).go()


def used(read, written):
    """By an operation of the current stream, which begins."""
    with changing:
        if races:
            raise RuntimeError(races.pop())
        stream = current_stream()
        moment = stream.begin()
        for tensor in read:
            tensor.held.memory.use(stream, moment, writes=False)
        for tensor in written:
            tensor.held.memory.use(stream, moment, writes=True)
