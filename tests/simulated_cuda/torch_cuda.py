"""What takes the place of the same names in torch.cuda, beside streams: a device, and graphs that do again what was
done."""

import functools
import os
import warnings
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_leaves

from tests.simulated_cuda.memory import allocated
from tests.simulated_cuda.streams import may_not_capture, waiting

NAME = "simulated CUDA"
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
NUM_DEVICES = len(VISIBLE)
MEMORY_BYTES = 2 * 2**30
CAPABILITY = (8, 0)


def is_available():
    return True


def is_initialized():
    return True


def _lazy_init():
    pass


def device_count():
    return NUM_DEVICES


def get_device_name(device=None):
    return NAME


def get_device_capability(device=None):
    return CAPABILITY


def get_device_properties(device=None):
    uuid = f"simulated {VISIBLE[getattr(device, 'index', device) or 0]}"
    return SimpleNamespace(name=NAME, total_memory=MEMORY_BYTES, multi_processor_count=1, uuid=uuid)


def mem_get_info(device=None):
    return MEMORY_BYTES - memory_allocated(), MEMORY_BYTES


def memory_allocated(device=None):
    return sum(memory.num_bytes for memory in allocated.values())


def empty_cache():
    pass


def manual_seed_all(seed):
    pass


def set_device(device):
    pass


@contextmanager
def device(device):
    yield


@functools.cache
def _warn_of_prototype():
    warnings.warn("the mode of synchronization is a prototype", UserWarning, stacklevel=3)


def set_sync_debug_mode(mode):
    """As in torch, the first call of a process warns, after the mode is set."""
    waiting.is_error = mode in ("error", 2)
    _warn_of_prototype()


graphs = weakref.WeakSet()


class CUDAGraph:
    """Does again, with the same tensors, what was done while it was captured."""

    def __init__(self):
        self.steps = None
        graphs.add(self)

    @property
    def has_collectives(self):
        results = [leaf for step in self.steps or () for leaf in tree_leaves(step[-1])]
        return any(isinstance(result, torch.ScriptObject) for result in results)

    def replay(self):
        for kernel, args, kwargs, results in self.steps:
            again = kernel(*args, **kwargs)
            for target, source in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(target, torch.Tensor):
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)
                elif isinstance(source, torch.ScriptObject):  # of a collective, what is done behind it waits for it
                    torch._C._distributed_c10d.Work.unbox(source).wait()


@contextmanager
def graph(graph, pool=None, stream=None, capture_error_mode="global"):
    may_not_capture("another graph")
    waiting.capture = []
    try:
        yield
        graph.steps = waiting.capture
    finally:
        waiting.capture = None


def graph_pool_handle():
    return (0, 1)
