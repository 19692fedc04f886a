"""Kernels of Triton by its own interpreter, on the simulated device."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from unittest.mock import patch

import torch
from triton import language
from triton.runtime import interpreter

from tests.simulated_cuda.memory import used
from tests.simulated_cuda.streams import waiting
from tests.simulated_cuda.tensors import CudaTensor


def interpret():
    """From now on kernels run there, and are captured as all else is."""
    interpreter.GridExecutor.__call__ = launched(interpreter.GridExecutor.__call__)
    interpreter._patch_lang_tensor = indexed(interpreter._patch_lang_tensor)
    builder = interpreter.InterpreterBuilder
    builder.create_dot, builder.cast_impl = widened(builder.create_dot), over_float32(builder.cast_impl)


def launched(launch):
    """Given tensors of the device alone."""

    def call(self, *args, **options):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not all(isinstance(tensor, CudaTensor) for tensor in tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        hosts = [getattr(arg, "host", arg) for arg in args]

        def run():
            with patch.object(interpreter.GridExecutor, "_restore_args_dev"):  # it was given what it writes to
                launch(self, *hosts, **options)

        if waiting.capture is not None:
            waiting.capture.append((run, (), {}, None))
        else:
            used((), tensors)  # it is not known which of them it writes to
        run()

    return call


def indexed(patch_tensor):
    """A number is an index: Triton 3.6 has it in an array of one, which NumPy 2.4 turns into none by itself."""

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


def widened(dot):
    """Of bfloat16 too, of which the interpreter has the bits alone."""

    def create_dot(self, first, second, *rest):
        return dot(self, as_float(self, first), as_float(self, second), *rest)

    return create_dot


def over_float32(cast):
    """To bfloat16 also from what the interpreter does not know how to round."""

    def cast_impl(self, source, target):
        if target.scalar == language.bfloat16 and source.dtype.scalar not in (language.float32, language.bfloat16):
            source = cast(self, source, language.float32)
        return cast(self, source, target)

    return cast_impl


def as_float(builder, handle):
    return builder.cast_impl(handle, language.float32) if handle.dtype.scalar == language.bfloat16 else handle
