"""Route tokens to experts and sum the experts' outputs on CPUs, with the compiled functions of engine/native/experts.c
if built.

The functions are the same for all CPUs; SPLITSERVE_NATIVE=off disables them too.
"""

import ctypes
from pathlib import Path
from typing import Final

import torch

from engine.model.steps import Dispatch, Routing, Shared, TorchDispatch
from engine.native import library as native_library
from engine.native.threads import threads_for

VERSION: Final = 1  # EXPERTS_VERSION in native/experts.c
ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1}


class ExpertsLibrary:
    """The functions of the compiled library."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises OSError if it cannot be loaded or has another version."""
        library = ctypes.CDLL(str(path))
        pointer, int32 = ctypes.c_void_p, ctypes.c_int32
        self.route = library.experts_route
        self.route.restype = None
        self.route.argtypes = [pointer, int32, int32, int32, int32, int32, int32, *(pointer,) * 6]
        self.mix = library.experts_mix
        self.mix.restype = None
        self.mix.argtypes = [pointer, int32, int32, int32, int32, int32, *(pointer,) * 6]
        if library.experts_version() != VERSION:
            raise OSError(f"{path.name} is of another version: install the package again")


def experts_library() -> ExpertsLibrary | None:
    """Return the functions of this installation's library, if built."""
    return native_library.load(ExpertsLibrary)


def choose_dispatch(device: torch.device) -> Dispatch:
    """Return the fastest dispatch for a device. Raises UnknownVariant."""
    library = experts_library() if device.type == "cpu" and native_library.wanted_variants() else None
    return TorchDispatch() if library is None else NativeDispatch(library)


class NativeDispatch:
    """Native dispatch for float32 and bfloat16; torch's for other dtypes."""

    def __init__(self, library: ExpertsLibrary) -> None:
        self._library = library
        self._portable = TorchDispatch()

    def route(self, logits: torch.Tensor, num_chosen: int, is_normalized: bool) -> Routing:
        if logits.dtype not in ELEMENTS:
            return self._portable.route(logits, num_chosen, is_normalized)
        logits = logits.contiguous()
        num_tokens, num_experts = logits.shape
        routing = Routing(
            tokens=torch.empty(num_tokens * num_chosen, dtype=torch.int64),
            starts=torch.empty(num_experts + 1, dtype=torch.int32),
            places=torch.empty((num_tokens, num_chosen), dtype=torch.int64),
            weights=torch.empty((num_tokens, num_chosen)),
        )
        chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int32)
        self._library.route(
            *threads_for(logits.numel()),
            ELEMENTS[logits.dtype],
            num_tokens,
            num_experts,
            num_chosen,
            is_normalized,
            logits.data_ptr(),
            chosen.data_ptr(),
            *(tensor.data_ptr() for tensor in routing),
        )
        return routing

    def mix(self, rows: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
        if rows.dtype not in ELEMENTS:
            return self._portable.mix(rows, routing, shared)
        num_tokens, num_chosen = routing.places.shape
        outputs = rows.new_empty((num_tokens, rows.shape[1]))
        self._library.mix(
            *threads_for(rows.numel()),
            ELEMENTS[rows.dtype],
            num_tokens,
            rows.shape[1],
            num_chosen,
            rows.data_ptr(),
            routing.places.data_ptr(),
            routing.weights.data_ptr(),
            *((None, None) if shared is None else (tensor.data_ptr() for tensor in shared)),
            outputs.data_ptr(),
        )
        return outputs
