"""The order of copies and computation where layers are in host memory, on simulated streams, which do what they were
asked for in any order that their events allow. Tensors and copies are real."""

import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.offload.layers_on_host import HostLayer, LayersOnHost
from engine.offload.residence import ROOM

CPU = torch.device("cpu")


class Stream:
    """What it was asked to do and has not done. An entry waits until it gives True."""

    def __init__(self):
        self.queue = []

    def wait_event(self, event):
        self.queue.append(event.is_over)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def advance(self):
        """Whether the first entry could be done."""
        if not self.queue or not self.queue[0]():
            return False
        del self.queue[0]
        return True


class Event:
    def __init__(self):
        self.is_over = lambda: True  # recorded nowhere

    def record(self, stream):
        passed = []
        stream.queue.append(lambda: passed.append(1) is None)
        self.is_over = lambda: bool(passed)


class SimulatedDevice(TorchDispatchMode):
    """Takes the place of torch.cuda. Copies are put into the current stream while it is entered as a mode."""

    Event = Event

    def __init__(self):
        super().__init__()
        self.computing = self.current = Stream()
        self.streams = [self.computing]  # and those that are made
        self.num_computed, self.most_computed = 0, sys.maxsize
        self.num_copied, self.most_copied = 0, sys.maxsize

    def Stream(self, device):  # as torch.cuda calls it
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source, computes = args[0], args[1].detach(), self.current is self.computing

        def copy():
            if self.num_computed == self.most_computed if computes else self.num_copied == self.most_copied:
                return False
            target.copy_(source)
            self.num_computed += computes
            self.num_copied += not computes
            return True

        self.current.queue.append(copy)
        return target


class Copying(nn.Module):
    """A layer that gives its weights."""

    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(number)), requires_grad=False)

    def forward(self, outputs):
        outputs.copy_(self.weight)


def layers_on(device, num_layers):
    modules = [Copying(number) for number in range(num_layers)]
    with patch.object(torch, "get_device_module", lambda _: device):
        layers = {number: HostLayer(module, [module.weight], CPU) for number, module in enumerate(modules)}
        return modules, LayersOnHost(layers, CPU)


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=8), st.randoms(use_true_random=False))
def test_in_any_order_that_events_allow_each_layer_computes_with_its_own_weights(num_layers, entered, order):
    device = SimulatedDevice()
    modules, offloaded = layers_on(device, num_layers)
    entered = [*range(num_layers), *range(num_layers), *(each % num_layers for each in entered)]
    outputs = torch.full((len(entered), 3), -1.0)
    with device:
        for row, number in zip(outputs, entered, strict=True):
            modules[number](row)
    assert (outputs == -1).all(), "nothing was done meanwhile"
    while any(stream.queue for stream in device.streams):
        first, second = order.sample(device.streams, 2)
        assert first.advance() or second.advance(), "they wait for each other"
    assert outputs[:, 0].tolist() == entered
    assert offloaded.num_read_bytes % offloaded.layer_bytes[0] == 0


@pytest.fixture
def two_steps():
    """Of five layers, which were asked for: the device, and what goes as far as may be."""
    device = SimulatedDevice()
    modules, _ = layers_on(device, 5)
    with device:
        for number in (*range(5), *range(5)):
            modules[number](torch.zeros(3))

    def advance():
        while any(stream.advance() for stream in device.streams):
            pass

    return device, advance


def test_the_next_layer_is_copied_while_one_computes(two_steps):
    device, advance = two_steps
    for device.most_computed in range(11):
        advance()
        assert (device.num_computed, device.num_copied) == (device.most_computed, device.most_computed + ROOM)


def test_a_layer_waits_for_its_own_copy_alone(two_steps):
    device, advance = two_steps
    for device.most_copied in range(11):
        advance()
        assert (device.num_copied, device.num_computed) == (device.most_copied, device.most_copied)
