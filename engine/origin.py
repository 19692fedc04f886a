"""What the bits of an engine's KV depend on beside the model: its kernels, its ranks and the machine."""

import hashlib
from collections.abc import Mapping
from typing import Final

import torch

from engine.native import library
from serving_core.prefix import origin_of

COUNTS: Final = "num_"  # of what torch tells of a CPU: cores and sockets, which show in the number of threads


def engine_origin(description: Mapping[str, str], device: torch.device) -> bytes:
    """Equal for engines of one fingerprint that give equal bits for equal steps; the inverse is not promised. Takes
    an engine's description of itself."""
    facts = {**description, "torch": torch.__version__}
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        facts |= {f"cpu_{key}": str(value) for key, value in capabilities.items() if not key.startswith(COUNTS)}
        facts |= {"variants": " ".join(library.wanted_variants()), "kernels": _kernels_digest()}
    return origin_of(facts)


def _kernels_digest() -> str:
    """Of the compiled kernels: another compiler may add in another order."""
    path = library.library_path()
    return "none" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
