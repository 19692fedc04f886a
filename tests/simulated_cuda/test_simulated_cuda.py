"""The simulated device refuses what CUDA refuses, and its graphs do again what was done: else tests/gpu would pass on
it for nothing."""

import gc

import pytest
import torch

from tests.simulated_cuda.tensors import CudaTensor

CUDA = torch.device("cuda", 0)
HERE_ALONE = pytest.mark.skipif(
    not isinstance(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"), CudaTensor),
    reason="of the simulated device, which --simulate-cuda gives where there is none and a C++ compiler is",
)
pytestmark = HERE_ALONE


def made_in_many_ways():
    yield torch.zeros(3, device=CUDA)
    yield torch.tensor([1.0, 2.0], device="cuda")
    yield torch.arange(4, device=CUDA)
    yield torch.randn(2, 2).to(CUDA)
    yield torch.randn(2, 2).cuda()
    yield torch.ones(2, 3, device=CUDA)[1:].T
    yield torch.empty_like(torch.ones(2, device=CUDA))


def test_tensors_say_where_they_are():
    for tensor in made_in_many_ways():
        assert (tensor.device, tensor.is_cuda) == (CUDA, True)
        assert not tensor.cpu().is_cuda
        assert tensor.cpu().tolist() == tensor.tolist()


def test_devices_do_not_mix():
    ours, there, other = torch.ones(2, device=CUDA), torch.ones(2), torch.ones(2, device="cuda:1")
    for wrong in (there, other):
        with pytest.raises(RuntimeError, match="same device"):
            ours + wrong
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat((wrong, ours))
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 2, device=CUDA).index_select(0, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="same device"):
        ours[torch.tensor([0, 1], device=CUDA)] = there
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2]
    with pytest.raises(TypeError, match="numpy"):
        ours.numpy()


def test_one_memory_is_written_through_views_and_parameters():
    whole = torch.zeros(2, 3, device=CUDA)
    parameter = torch.nn.Parameter(whole, requires_grad=False)
    whole[1].add_(2)
    parameter.view(-1)[:2].copy_(torch.ones(2))
    assert parameter.tolist() == whole.tolist() == [[1, 1, 0], [2, 2, 2]]
    parameter.data = torch.full((2,), 7.0, device=CUDA)
    assert (parameter + 1).tolist() == [8, 8]


WAITING = {
    "item": lambda ours: ours[0].item(),
    "tolist": lambda ours: ours.tolist(),
    "nonzero": lambda ours: ours.nonzero(),
    "mask": lambda ours: ours[ours > 0],
    "index": lambda ours: ours[torch.tensor([0])],
    "cpu": lambda ours: ours.cpu(),
    "fill from the host": lambda ours: ours.copy_(torch.ones(2)),
    "new": lambda ours: torch.tensor([1.0], device=CUDA),
    "if": lambda ours: bool((ours > 0).all()),
}


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING)
def test_what_waits_is_an_error_where_it_may_not(wait):
    ours = torch.ones(2, device=CUDA)
    wait(ours)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait(ours)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait(ours)
    wait(ours)


def test_copies_that_need_not_be_awaited():
    ours, there = torch.zeros(2, device=CUDA), torch.ones(2).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.copy_(torch.ones(2), non_blocking=True)
        there.to(CUDA, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        ours.copy_(there, non_blocking=True)
        with pytest.raises(RuntimeError, match="capturing"):
            ours.copy_(torch.ones(2), non_blocking=True)


def test_a_graph_computes_again_from_the_same_addresses():
    given, weights, result = torch.zeros(2, device=CUDA), torch.eye(2, device=CUDA), torch.zeros(2, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = weights @ given
        result.copy_(between.view(2).add(1))
    given.copy_(torch.tensor([3.0, 4.0]))
    weights.mul_(2)
    graph.replay()
    assert (between.tolist(), result.tolist()) == ([6, 8], [7, 9])


@pytest.fixture
def two_streams():
    torch.cuda.synchronize()
    return torch.cuda.Stream(), torch.cuda.Stream()


def test_what_another_stream_may_be_writing_is_not_read(two_streams):
    first, second = two_streams
    with torch.cuda.stream(first):
        ours = torch.ones(2, device=CUDA)
        written = first.record_event()
    with torch.cuda.stream(second):
        with pytest.raises(RuntimeError, match="read beside another stream"):
            ours + 1
        second.wait_event(written)
        assert (ours + 1).tolist() == [2, 2]
    with torch.cuda.stream(first):
        ours[:1].view(1, 1).add_(1)
        first.synchronize()
    with torch.cuda.stream(second):
        assert ours.tolist() == [2, 1]


def test_what_another_stream_may_be_reading_is_not_written(two_streams):
    first, second = two_streams
    ours = torch.ones(2, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        twice = ours * 2
    with torch.cuda.stream(second):
        assert (ours * 2).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="written beside another stream"):
            ours.zero_()
        second.wait_stream(first)
        ours.zero_()
    torch.cuda.synchronize()
    assert (ours.tolist(), twice.tolist()) == ([0, 0], [2, 2])


def test_memory_is_not_let_go_while_another_stream_may_be_using_it(two_streams):
    first, second = two_streams

    def use(*streams):
        with torch.cuda.stream(first):
            ours = torch.ones(2, device=CUDA)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            ours * 2
        for stream in streams:
            ours.record_stream(stream)
        del ours
        torch.zeros(1, device=CUDA)

    use(second)
    with pytest.raises(RuntimeError, match="let go"):
        use()
    torch.zeros(1, device=CUDA)  # it is told once


def test_what_comes_to_the_host_is_there_when_it_was_awaited(two_streams):
    stream = two_streams[0]
    with torch.cuda.stream(stream):
        ours, there = torch.ones(2, device=CUDA), torch.zeros(2).pin_memory()
        there.copy_(ours, non_blocking=True)
        new = ours.to("cpu", non_blocking=True)
        assert there.tolist() != [1, 1] != new.tolist()
        stream.synchronize()
        assert there.tolist() == new.tolist() == [1, 1]


def test_a_stream_sleeps_until_the_host_waits_for_it(two_streams):
    first, second = two_streams
    with torch.cuda.stream(first):
        before = first.record_event()
        torch.cuda._sleep(1)
        behind = first.record_event()
    with torch.cuda.stream(second):
        assert torch.ones(2, device=CUDA).tolist() == [1, 1]
    assert before.query()
    assert not behind.query()
    behind.synchronize()
    assert behind.query()


def test_memory_is_counted_once_and_until_it_is_let_go():
    gc.collect()
    before = torch.cuda.memory_allocated()
    first = torch.zeros(1000, device=CUDA)
    second, parameter = first[10:].view(-1), torch.nn.Parameter(torch.zeros(500, device=CUDA), requires_grad=False)
    assert torch.cuda.memory_allocated() - before == 6000
    parameter.data = second
    del first
    gc.collect()
    assert torch.cuda.memory_allocated() - before == 4000
    del second, parameter
    gc.collect()
    assert torch.cuda.memory_allocated() == before
