"""What the bits of an engine's answers depend on beside the model: its kernels, its ranks and the machine."""

import hashlib
from collections.abc import Mapping
from typing import Final

import torch

from engine.native import library

COUNTS: Final = "num_"  # of what torch tells of a CPU: cores and sockets, which show in the number of threads
THREADS: Final = "threads"


def engine_traits(description: Mapping[str, str], device: torch.device, *, kernels_alone: bool) -> dict[str, str]:
    """Equal for engines of one fingerprint that give equal bits for equal steps; the inverse is not promised. Takes
    an engine's description of itself, and whether compiled kernels compute all of it that adds anything up: these know
    no number of threads, and of the CPU its instructions alone."""
    traits = {**description, "torch": torch.__version__}
    if kernels_alone:
        del traits[THREADS]
    if device.type == "cpu":
        traits |= {"cpu": _cpu(instructions_alone=kernels_alone), "kernels": _kernels()}
    return traits


def _cpu(*, instructions_alone: bool) -> str:
    """What torch knows of the CPU, as words."""
    known = {key: value for key, value in torch.cpu.get_capabilities().items() if not key.startswith(COUNTS)}
    words = [key for key, value in known.items() if value is True]
    if not instructions_alone:
        words += [f"{key}={value}".replace(" ", "-") for key, value in known.items() if not isinstance(value, bool)]
    return " ".join(sorted(words))


def _kernels() -> str:
    """The variants that may be used, and what tells compiled libraries apart: another compiler may add in another
    order."""
    path = library.library_path()
    digest = "none" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return " ".join((*library.wanted_variants(), digest))
