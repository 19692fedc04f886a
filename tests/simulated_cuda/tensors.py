"""Tensors that say that they are on a CUDA device, in host memory.

Each operation on them is done by the CPU. It is refused where CUDA would refuse it: beside a tensor of another device,
while a graph is captured if it makes the host wait, and if it does so under torch.cuda.set_sync_debug_mode("error").
"""

import functools
import threading
import weakref

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten
CPU = torch.device("cpu")
ANY_DEVICES = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor}  # that may be of several devices
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


class Waiting(threading.local):
    """What becomes of operations that make the host wait, in this thread."""

    is_error = False  # of torch.cuda.set_sync_debug_mode
    capture = None  # the graph that is captured, a list of what was done


waiting = Waiting()
pinned = weakref.WeakValueDictionary()  # tensors in host memory, by their address
allocated = {}  # of each storage on a device, by its address: how large it is, and how many tensors it has
counting = threading.RLock()  # which a tensor that goes may need while another one comes


class Held:
    """One tensor's share in its storage."""

    def __init__(self, host):
        storage = host.untyped_storage()
        self.address = storage.data_ptr()
        with counting:
            num_bytes, count = allocated.get(self.address, (storage.nbytes(), 0))
            allocated[self.address] = num_bytes, count + 1

    def __del__(self):
        with counting:
            num_bytes, count = allocated.pop(self.address)
            if count > 1:
                allocated[self.address] = num_bytes, count - 1


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
        pass


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
    check_wait(func, leaves, ours, to, args, kwargs)
    hosts = [CPU if isinstance(leaf, torch.device) else getattr(leaf, "host", leaf) for leaf in leaves]
    host_args, host_kwargs = tree_unflatten(hosts, spec)
    kernel = KERNELS.get(func, func)
    result = kernel(*host_args, **host_kwargs)
    if waiting.capture is not None:
        waiting.capture.append((kernel, host_args, host_kwargs, result))
    return wrapped(result, to, {id(tensor.host): tensor for tensor in ours})


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


def check_wait(func, leaves, ours, to, args, kwargs):
    """Raises RuntimeError where the host would wait and may not."""
    if (waiting.is_error or waiting.capture is not None) and ours and awaits(func, args, kwargs, to):
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
        return CudaTensor(func(*args, device=CPU, **kwargs), numbered(device or torch.device("cuda")))

    return made
