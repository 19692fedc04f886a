"""Kernels of Triton by its own interpreter, on the simulated device."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from unittest.mock import patch

import torch
from triton import language
from triton.runtime import interpreter

from tests.simulated_cuda.tensors import CudaTensor, waiting


def interpret():
    """From now on kernels run there, and are captured as all else is."""
    interpreter.GridExecutor.__call__ = launched(interpreter.GridExecutor.__call__)
    interpreter.InterpreterBuilder.create_dot = widened(interpreter.InterpreterBuilder.create_dot)


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

        run()
        if waiting.capture is not None:
            waiting.capture.append((run, (), {}, None))

    return call


def widened(dot):
    """Of bfloat16 too, of which the interpreter has the bits alone."""

    def create_dot(self, first, second, *rest):
        return dot(self, as_float(self, first), as_float(self, second), *rest)

    return create_dot


def as_float(builder, handle):
    return builder.cast_impl(handle, language.float32) if handle.dtype.scalar == language.bfloat16 else handle
