"""Tensors that say that they are on a CUDA device, in host memory.

Each operation on them is done by the CPU. It is refused where CUDA would refuse it: beside a tensor of another device,
while a graph is captured if it makes the host wait, and if it does so under torch.cuda.set_sync_debug_mode("error").
"""

import functools
import weakref

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

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


@functools.cache
def is_composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def dispatched(func, args, kwargs):
    """What the operation gives, done by the CPU."""
    if func is aten.set_.source_Storage:
        ours, storage = args
        ours.data = CudaTensor(torch.empty(0, dtype=ours.dtype).set_(storage), ours.on)
        return ours
    if is_composite(func) and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
        return result
    leaves, spec = tree_flatten((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
    to = kwargs.get("device")
    to = numbered(torch.device(to)) if to is not None else (ours[0].on if ours else CPU)
    check_devices(func, leaves, ours, args)
    is_awaited = bool(ours) and awaits(func, args, kwargs, to)
    check_wait(func, is_awaited)
    hosts = [CPU if isinstance(leaf, torch.device) else getattr(leaf, "host", leaf) for leaf in leaves]
    host_args, host_kwargs = tree_unflatten(hosts, spec)
    kernel = KERNELS.get(func, func)
    if waiting.capture is not None:
        result = kernel(*host_args, **host_kwargs)
        waiting.capture.append((kernel, host_args, host_kwargs, result))
        return wrapped(result, to, {id(tensor.host): tensor for tensor in ours})
    if not (is_view := is_view_of(func)):
        used(ours, written_by(func, args, kwargs))
    result = kernel(*host_args, **host_kwargs)
    if is_awaited:
        with changing:
            host_learns(current_stream().clock)
    elif ours and func in COPIES and (args[0].device if func is aten.copy_.default else to) == CPU:
        copied_later(result)
    result = wrapped(result, to, {id(tensor.host): tensor for tensor in ours})
    if not is_view:
        used((), [leaf for leaf in tree_leaves(result) if isinstance(leaf, CudaTensor)])
    return result


@functools.cache
def is_view_of(func):
    """Whether it gives views, and does nothing else."""
    aliases = [given.alias_info for given in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def written_by(func, args, kwargs):
    """What it writes to of what it was given."""
    named = [(*named, None)[:2] for named in zip(func._schema.arguments, args, strict=False)]
    named += [(argument, kwargs.get(argument.name)) for argument in func._schema.arguments[len(args) :]]
    given = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, CudaTensor)]


def copied_later(on_host):
    """It is not awaited: until somebody waits for the stream, nothing of use is there."""
    values = on_host.clone()
    on_host.view(-1).view(torch.uint8).fill_(0xA5)
    with changing:
        current_stream().copy_later(lambda: on_host.copy_(values))


def numbered(device):
    """The same; of CUDA without a number the first."""
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def wrapped(result, device, known):
    """The same, of tensors of the device, and those that were given as they were."""
    leaves, spec = tree_flatten(result)
    return tree_unflatten([wrapped_leaf(leaf, device, known) for leaf in leaves], spec)


def wrapped_leaf(leaf, device, known):
    if not isinstance(leaf, torch.Tensor) or device.type == "cpu":
        return leaf
    ours = known.get(id(leaf))
    if ours is None:
        return CudaTensor(leaf, device)
    assert ours.shape == leaf.shape, "tensors that change their shape are not simulated"
    return ours


def check_devices(func, leaves, ours, args):
    """As CUDA: all of one device, but for numbers, and what copies."""
    if func in ANY_DEVICES:
        return
    if func in WITH_INDICES:
        leaves = [args[0], *args[2:]]
    others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, CudaTensor)]
    devices = {tensor.on for tensor in ours} | {tensor.device for tensor in others if tensor.ndim}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {devices}")


def check_wait(func, is_awaited):
    """Raises RuntimeError where the host would wait and may not."""
    if is_awaited and (waiting.is_error or waiting.capture is not None):
        what = "when stream is capturing" if waiting.capture is not None else "called a synchronizing CUDA operation"
        raise RuntimeError(f"{func}: operation not permitted {what}")


def awaits(func, args, kwargs, to):
    if func in AWAITING:
        return True
    if func in WITH_INDICES:
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) or index.device.type == "cpu" for index in indices)
    if func is aten.copy_.default:
        return copy_awaits(args[:2], args[0].device, (*args, False)[2])
    if func is aten._to_copy.default:
        return copy_awaits(args[:1], to, kwargs.get("non_blocking", False))
    return False


def copy_awaits(tensors, to, non_blocking):
    if {tensor.device.type for tensor in tensors} == {to.type}:
        return False
    return not non_blocking or (waiting.capture is not None and not any(map(is_pinned, tensors)))


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
