"""Tensors that say that they are on a CUDA device, in host memory.

Each operation on them is done by the CPU. It is refused where CUDA would refuse it: beside a tensor of another device,
while a graph is captured if it makes the host wait, and if it does so under torch.cuda.set_sync_debug_mode("error").
"""

import functools
import weakref

import torch

from tests.simulated_cuda.memory import Held, used
from tests.simulated_cuda.streams import changing, current_stream, host_learns, waiting

aten = torch.ops.aten
CPU = torch.device("cpu")
COPIES = {aten.copy_.default, aten._to_copy.default}
ANY_DEVICES = {*COPIES, aten.set_.source_Tensor}  # that may be of several devices
WITH_INDICES = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}  # which may be on the host
AWAITING = {  # the host waits for their result, or for its size
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.allclose.default,
}


def histc(values, bins=100, min=0, max=0):
    """Of whole numbers too, which a CPU does not count."""
    return torch.histc(values.float(), bins, min, max).to(values.dtype)


KERNELS = {aten.histc.default: histc}


pinned = weakref.WeakValueDictionary()  # tensors in host memory, by their address


class CudaTensor(torch.Tensor):
    """On a device; `host` is where it is in truth."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host, device):
        tensor = torch.Tensor._make_subclass(cls, host, False, dispatch_device=True, device_for_backend_keys=device)
        tensor.host, tensor.on, tensor.held = host, device, Held(host)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].on
        return dispatched(func, args, kwargs or {})

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.host, self.on = getattr(value, "host", value), value.device
        self.held = Held(self.host) if value.is_cuda else None

    def numpy(self, *, force=False):
        raise TypeError("can't convert a tensor of a CUDA device to numpy")

    __array__ = numpy

    def tolist(self):
        return self.cpu().tolist()

    def __deepcopy__(self, memo):
        return self.clone()

    def record_stream(self, stream):
        self.held.memory.also_of.add(stream.number)


class Operation:
    """What torch says of one, asked once."""

    def __init__(self, func):
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        self.is_composite = has_kernel(func.name(), "CompositeImplicitAutograd")
        self.kernel = KERNELS.get(func, func)
        self.is_copy, self.takes_indices = func in COPIES, func in WITH_INDICES
        self.is_of_one_device = func not in ANY_DEVICES
        aliases = [given.alias_info for given in func._schema.returns]
        self.is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        arguments = enumerate(func._schema.arguments)
        self._writes = [(at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write]
        self._always, self._awaits = func in AWAITING, AWAITING_SOME.get(func)

    def written(self, args, kwargs):
        """Of what it is given, what it writes to."""
        written = []
        for at, name in self._writes:
            on_host(args[at] if at < len(args) else kwargs.get(name), written, [])
        return written

    def is_awaited(self, args, kwargs, to):
        return self._always or (self._awaits is not None and self._awaits(args, kwargs, to))


operation_of = functools.cache(Operation)


def dispatched(func, args, kwargs):
    """What the operation gives, done by the CPU."""
    if func is aten.set_.source_Storage:
        ours, storage = args
        ours.data = CudaTensor(torch.empty(0, dtype=ours.dtype).set_(storage), ours.on)
        return ours
    operation = operation_of(func)
    if operation.is_composite and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
        return result
    ours, others = [], []
    host_args = [on_host(arg, ours, others) for arg in args]
    host_kwargs = {name: on_host(arg, ours, others) for name, arg in kwargs.items()}
    to = kwargs.get("device")
    to = numbered(torch.device(to)) if to is not None else (ours[0].on if ours else CPU)
    if operation.is_of_one_device:
        check_devices(func, ours, others, args[1] if operation.takes_indices else ())
    is_awaited = bool(ours) and operation.is_awaited(args, kwargs, to)
    check_wait(func, is_awaited)
    known = {id(tensor.host): tensor for tensor in ours}
    if waiting.capture is not None:
        result = operation.kernel(*host_args, **host_kwargs)
        waiting.capture.append((operation.kernel, host_args, host_kwargs, result))
        return on_device(result, to, known)
    if not operation.is_view:
        used(ours, operation.written(args, kwargs))
    result = operation.kernel(*host_args, **host_kwargs)
    if is_awaited:
        with changing:
            host_learns(current_stream().clock)
    elif ours and operation.is_copy and (args[0].device if func is aten.copy_.default else to) == CPU:
        copied_later(result)
    result = on_device(result, to, known)
    if not operation.is_view:
        on_host(result, made := [], [])
        used((), made)
    return result


def on_host(value, ours, others):
    """What the CPU is given for it. Its tensors are put down, those of a device and the others."""
    if isinstance(value, CudaTensor):
        ours.append(value)
        return value.host
    if isinstance(value, (list, tuple)):
        return type(value)([on_host(each, ours, others) for each in value])
    if isinstance(value, torch.Tensor):
        others.append(value)
    return CPU if isinstance(value, torch.device) else value


def copied_later(on_host):
    """It is not awaited: until somebody waits for the stream, nothing of use is there."""
    values = on_host.clone()
    on_host.view(-1).view(torch.uint8).fill_(0xA5)
    with changing:
        current_stream().copy_later(lambda: on_host.copy_(values))


def numbered(device):
    """The same; of CUDA without a number the first."""
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def on_device(result, device, known):
    """The same, of tensors of the device, and those that were given as they were."""
    if isinstance(result, (list, tuple)):
        return type(result)([on_device(each, device, known) for each in result])
    if not isinstance(result, torch.Tensor) or device.type == "cpu":
        return result
    ours = known.get(id(result))
    if ours is None:
        return CudaTensor(result, device)
    assert ours.shape == result.shape, "tensors that change their shape are not simulated"
    return ours


def check_devices(func, ours, others, indices):
    """As CUDA: all of one device, but for numbers, and indices, which may be on the host."""
    exempt = {id(index) for index in indices}
    devices = {tensor.on for tensor in ours if id(tensor) not in exempt}
    devices |= {tensor.device for tensor in others if tensor.ndim and id(tensor) not in exempt}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {devices}")


def check_wait(func, is_awaited):
    """Raises RuntimeError where the host would wait and may not."""
    if is_awaited and (waiting.is_error or waiting.capture is not None):
        what = "when stream is capturing" if waiting.capture is not None else "called a synchronizing CUDA operation"
        raise RuntimeError(f"{func}: operation not permitted {what}")


def copy_awaits(args, kwargs, to):
    target, source, *rest = args
    return transfer_awaits((target, source), target.device, any(rest))


def conversion_awaits(args, kwargs, to):
    return transfer_awaits(args[:1], to, kwargs.get("non_blocking", False))


def indices_await(args, kwargs, to):
    indices = [index for index in args[1] if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) or index.device.type == "cpu" for index in indices)


def transfer_awaits(tensors, to, non_blocking):
    if {tensor.device.type for tensor in tensors} == {to.type}:
        return False
    return not non_blocking or (waiting.capture is not None and not any(map(is_pinned, tensors)))


AWAITING_SOME = {  # whether the host waits, by what they are given
    aten.copy_.default: copy_awaits,
    aten._to_copy.default: conversion_awaits,
    **dict.fromkeys(WITH_INDICES, indices_await),
}


def is_pinned(tensor):
    """Whether a copy of it to a device can go on beside the host."""
    return tensor.untyped_storage().data_ptr() in pinned


def copy(target, source, non_blocking=False):
    dispatched(aten.copy_.default, (target, source, non_blocking), {})
    return target


def making(func):
    """What makes tensors, for those of a device."""

    def made(*args, device=None, layout=None, pin_memory=None, **kwargs):
        tensor = CudaTensor(func(*args, device=CPU, **kwargs), numbered(device or torch.device("cuda")))
        if waiting.capture is None:
            used((), [tensor])
        return tensor

    return made
