"""The simulated network and processes: what they keep in order, what they lose, and that real ends work over them."""

import asyncio
from random import Random

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.results import Received, Sent
from protos import fleet_pb2
from tests.schedules.coordinator import SimulatedCoordinator
from tests.schedules.network import COORDINATOR, Network, Noise
from tests.schedules.node import LAYOUT, SimulatedNode, Sizes
from tests.schedules.processes import Process, SimulatedLoop
from tests.schedules.streams import Channel

SIZES = Sizes(12, 16, 4, 4, is_batch_invariant=True)


class Wires:
    """A network with nobody in it."""

    def __init__(self, seed=0):
        self.loop = SimulatedLoop()
        self.notes = []
        self.loop.network = self.network = Network(self.loop, Random(seed), self.notes.append)
        self.processes = []

    def process(self, name, **clock):
        self.processes.append(Process(name, **clock))
        return self.processes[-1]

    def run(self, *, until_s):
        self.loop.plan(self.loop.outside, until_s, lambda: None)
        self.loop.run(lambda: self.loop.now >= until_s)

    def end(self):
        self.loop.end(self.processes)


@pytest.fixture
def wires():
    wires = Wires()
    yield wires
    wires.end()


def test_what_a_process_has_missed_happens_in_the_order_in_which_it_was_due(wires):
    """Also where it was stopped once more before it went on: the first is put off twice, the others once."""
    process, told = wires.process("a"), []
    for due_s in (3.0, 1.0, 2.0):
        wires.loop.plan(process, due_s, told.append, due_s)
    process.resumes_s = 2.5
    wires.loop.plan(wires.loop.outside, 1.2, setattr, process, "resumes_s", 4.0)
    wires.run(until_s=5.0)
    assert told == [1.0, 2.0, 3.0]


def test_a_clock_of_its_own_changes_nothing_but_the_time_told(wires):
    process, told = wires.process("a", ahead_s=1000.0, pace=1.25), []

    async def sleep():
        await asyncio.sleep(10.0)
        told.append((wires.loop.time(), wires.loop.now))

    wires.loop.start(process, sleep())
    wires.run(until_s=20.0)
    assert told == [(1010.0, 8.0)]


def test_who_is_dead_does_nothing_and_who_stands_still_does_it_later(wires):
    dead, paused, done = wires.process("dead"), wires.process("paused"), []
    for process in (dead, paused):
        wires.loop.plan(process, 1.0, lambda name=process.name: done.append((name, wires.loop.now)))
    dead.is_dead, paused.resumes_s = True, 5.0
    wires.run(until_s=9.0)
    assert done == [("paused", 5.0)]


async def echo(_, context):
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(fleet_pb2.NodeCommand.FromString(message))


def talk(wires, heard, *, num_messages=50, every_s=0.01):
    """A node that says something and notes what comes back."""
    node, coordinator = wires.process("node"), wires.process(COORDINATOR)
    wires.network.serve(coordinator, echo)

    async def write(call):
        for index in range(num_messages):
            attempt = fleet_pb2.Attempt(epoch=index)
            await call.write(fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel(attempt=attempt)))
            await asyncio.sleep(every_s)

    async def read():
        call = Channel("", options=()).Attach(metadata=())
        writing = asyncio.create_task(write(call))
        try:
            while True:
                heard.append((await call.read()).cancel.attempt.epoch)
        except grpc.aio.AioRpcError as error:
            heard.append(error.code())
        writing.cancel()

    wires.loop.start(node, read())


def test_a_stream_keeps_its_order(wires):
    heard = []
    talk(wires, heard)
    wires.run(until_s=5.0)
    assert heard == list(range(50))


def test_a_broken_stream_loses_its_tail_and_both_ends_hear_of_it(wires):
    heard = []
    talk(wires, heard)
    wires.loop.plan(wires.loop.outside, 0.25, wires.network.reset, "node", COORDINATOR)
    wires.run(until_s=5.0)
    *numbers, error = heard
    assert numbers == list(range(len(numbers)))
    assert 5 < len(numbers) < 30
    assert error is grpc.StatusCode.UNAVAILABLE


def test_a_block_that_ends_soon_only_delays_and_a_long_one_breaks(wires):
    heard = []
    talk(wires, heard)
    wires.loop.plan(wires.loop.outside, 0.2, wires.network.block, "node", COORDINATOR, 2.0)
    wires.run(until_s=1.0)
    assert len(heard) < 30
    wires.run(until_s=3.0)
    assert heard == list(range(50))
    wires.loop.plan(wires.loop.outside, 4.0, wires.network.block, COORDINATOR, "node", 60.0)
    wires.run(until_s=40.0)
    assert heard[-1] is grpc.StatusCode.UNAVAILABLE


def begin(wires, process, make):
    """Makes something within its process, and gives it."""
    made = []
    wires.loop.plan(process, wires.loop.now, lambda: made.append(make()))
    wires.loop.run(lambda: bool(made))
    return made[0]


def test_a_real_node_attaches_and_beats(wires):
    process, other = wires.process(COORDINATOR), wires.process("mixed-0", ahead_s=77.0)
    history = []
    settings = CoordinatorSettings()
    coordinator = begin(
        wires, process, lambda: SimulatedCoordinator(settings, wires.network, process, history.append, Random(0))
    )
    arguments = (SIZES, wires.network, other, history.append, Random(0))
    node = begin(wires, other, lambda: SimulatedNode("mixed-0", "mixed", *arguments))
    tasks = coordinator.start(wires.loop) + node.start(wires.loop)
    wires.run(until_s=30.0)
    assert [each.name for each in coordinator.registry.nodes] == ["mixed-0"]
    assert wires.network.num_streams == 1
    assert not any(task.done() for task in tasks)
    assert node.is_quiet
    assert coordinator.is_quiet
    assert not any(rest.count for rest in node.rests() + coordinator.rests())


@pytest.mark.parametrize(
    "noise",
    [Noise(), Noise(dropped=0.2), Noise(doubled=0.5), Noise(overtaken=0.5), Noise(changed=0.3)],
    ids=["silence", "dropped", "doubled", "overtaken", "changed"],
)
def test_blocks_come_over_whatever_noise_there_is(noise, wires):
    sender, receiver = (
        begin(
            wires,
            process := wires.process(name),
            lambda name=name, process=process: SimulatedNode(
                name, "mixed", SIZES, wires.network, process, lambda event: None, Random(name)
            ),
        )
        for name in ("one", "other")
    )
    wires.network.noise = noise
    results = transfer(wires, sender, receiver)
    assert [type(each) for each in results] == [Received, Sent]
    for layer in (0, 1):
        sent = sender.engine.pool.read(layer, [1, 2, 3])
        assert receiver.engine.pool.read(layer, [4, 5, 6]) == sent


def transfer(wires, sender, receiver):
    """Three blocks, and how it ends at the receiver and at the sender."""
    results = []

    def open_blocks():
        receiver.receiver.transport.allow([sender.sender.transport.key])
        sizes = {"prefill_tp": 1, "decode_tp": 1, "num_blocks": 3, "num_cached_blocks": 0, "ttl_s": 60.0}
        descriptor = TransferDescriptor.draw(epoch=1, layout=LAYOUT, addresses=[receiver.name], **sizes)
        receiver.receiver.expect(descriptor, [4, 5, 6], results.append)
        return descriptor

    descriptor = begin(wires, receiver.process, open_blocks)

    def send():
        outgoing = sender.sender.start(descriptor.encode(), results.append)
        outgoing.blocks_ready([1, 2])
        outgoing.finish([1, 2, 3], b"tail")

    begin(wires, sender.process, send)
    wires.run(until_s=wires.loop.now + 20.0)
    return sorted(results, key=lambda each: type(each).__name__)
