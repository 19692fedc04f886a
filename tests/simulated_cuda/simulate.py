"""Puts the simulated devices in place."""

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import distributed

from tests.simulated_cuda import streams, torch_cuda
from tests.simulated_cuda.attention import flash_attention
from tests.simulated_cuda.tensors import CudaTensor, copy, is_pinned, making, pinned

aten = torch.ops.aten
HERE = Path(__file__).parent
GUARD = HERE / "__pycache__" / f"guard-{torch.__version__}.so"
STREAMS = ("Stream", "Event", "stream", "default_stream", "current_stream", "set_stream", "synchronize", "_sleep")
TRITON = (
    "SIMULATED_TRITON"  # in the environment "0" does without it where torch has brought it: its interpreter is slow
)
REAL_INIT, REAL_DESTROY = distributed.init_process_group, distributed.destroy_process_group


def simulate():
    """From now on this process and its children in Python have CUDA devices. Takes a C++ compiler."""
    load_guard()
    if os.environ.get(TRITON) == "0":
        sys.modules["triton"] = None  # as if it were not installed
    with warnings.catch_warnings():  # a torch for CUDA has kernels of its own there, and says once that they go
        warnings.simplefilter("ignore", UserWarning)
        register()
    for name, value in vars(torch_cuda).items():
        if getattr(value, "__module__", None) == torch_cuda.__name__:
            setattr(torch.cuda, name, value)
    for name in STREAMS:
        setattr(torch.cuda, name, getattr(streams, name))
    torch.cuda.is_simulated = True
    torch.Generator = Generator
    torch.Tensor.is_cuda = property(lambda self: isinstance(self, CudaTensor))
    torch.Tensor.pin_memory = lambda self: noted(self.clone())
    torch.Tensor.is_pinned = is_pinned
    torch.empty, torch.ones = pinning(torch.empty), pinning(torch.ones)
    distributed.init_process_group = init_process_group
    distributed.destroy_process_group = destroy_process_group
    distributed.is_nccl_available = lambda: True
    distributed.ProcessGroupNCCL = ProcessGroupNCCL
    torch.UntypedStorage._share_cuda_ = share
    torch.UntypedStorage._new_shared_cuda = staticmethod(opened)
    if importlib.util.find_spec("triton"):
        from tests.simulated_cuda.kernels import interpret

        interpret()
    paths = [str(HERE / "children"), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))


def load_guard():
    """Compiles it, once for this torch."""
    if not GUARD.exists():
        GUARD.parent.mkdir(exist_ok=True)
        of_torch = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=GUARD.parent) as folder:
            draft = Path(folder) / GUARD.name
            compiling = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{of_torch / 'include'}", str(HERE / "guard.cpp")]
            subprocess.run([*compiling, "-o", str(draft), f"-L{of_torch / 'lib'}", "-lc10"], check=True)
            draft.replace(GUARD)
    ctypes.CDLL(str(GUARD))


def register():
    """What comes to CUDA's own kernels: what makes tensors, before there is one of ours."""
    on_cuda = torch.library.Library("aten", "IMPL", "CUDA")
    on_cuda.impl("copy_", copy)  # of torch.tensor
    ranges = (aten.arange.default, aten.arange.start, aten.arange.start_step)  # which first find how long they are
    for func in (aten.empty.memory_format, aten.empty_strided.default, *ranges, aten.eye.default):
        on_cuda.impl(func.name().removeprefix("aten::"), making(func))
    on_cpu = torch.library.Library("aten", "IMPL", "CPU")
    on_cpu.impl("_flash_attention_forward", flash_attention)  # what varlen_attn does is done by the CPU until here
    register.libraries = (on_cuda, on_cpu)  # what they registered goes with them


class Generator(torch.Generator):
    """Of any device, in truth the CPU's."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls)


def noted(tensor):
    """As pinned, as long as it is there."""
    pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def pinning(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **options):
        tensor = make(*args, **options)
        return noted(tensor) if pin_memory else tensor

    return made


def share(storage):
    """CUDA IPC's handle, of what is shared in truth by a file without a name."""
    descriptor, num_bytes = storage._share_fd_cpu_()
    return 0, f"/proc/{os.getpid()}/fd/{descriptor}".encode(), num_bytes, 0, b"", 0, b"", False


def opened(device, handle, num_bytes, *of_torch):
    """The other process's storage."""
    if handle.split(b"/")[2] == str(os.getpid()).encode():
        raise RuntimeError("CUDA error: invalid device context")  # of memory of this very process
    descriptor = os.open(handle, os.O_RDWR)
    try:
        return torch.UntypedStorage._new_shared_fd_cpu(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def init_process_group(backend, *, device_id=None, **options):
    assert ("nccl" in backend) == (device_id is not None)
    REAL_INIT("gloo", **options)


def destroy_process_group():
    assert not any(graph.has_collectives for graph in torch_cuda.graphs), "NCCL waits for all graphs that it is in"
    REAL_DESTROY()


class ProcessGroupNCCL:
    """One of gloo, which is given what is in truth in host memory."""

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        real = distributed.ProcessGroupGloo._Options()
        real._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        real._threads, real._timeout = 1, options._timeout
        self.group = distributed.ProcessGroupGloo(store, rank, size, real)

    def send(self, tensors, rank, tag):
        return self.group.send([tensor.host for tensor in tensors], rank, tag)

    def recv(self, tensors, rank, tag):
        return self.group.recv([tensor.host for tensor in tensors], rank, tag)

    def abort(self):
        self.group.abort()
