"""What the bits of an engine's answers depend on beside the model: its kernels, its ranks and the machine."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

import torch

from engine.native import library
from serving_core.extras import TRITON, is_installed

COUNTS: Final = "num_"  # of what torch tells of a CPU: cores and sockets, which show in the number of threads
NOTHING_TO_KERNELS: Final = (  # of what an engine says of itself
    "threads",
    "program",
    "pp_size",
    "sequence_parallel_min_tokens",
    "layers_offloaded",
)


def engine_traits(description: Mapping[str, str], device: torch.device, *, kernels_alone: bool) -> dict[str, str]:
    """Equal for engines of one fingerprint that give equal bits for equal steps; the inverse is not promised. Takes
    an engine's description of itself, and whether compiled kernels compute all of it that adds anything up: to these
    the number of threads is nothing, nor are stages or tokens divided over two ranks, nor is a step as one program,
    and of the CPU its instructions alone count."""
    left_out = NOTHING_TO_KERNELS if kernels_alone else ()
    traits = {key: value for key, value in description.items() if key not in left_out} | {"torch": torch.__version__}
    if device.type == "cpu":
        traits |= {"cpu": _cpu(instructions_alone=kernels_alone), "kernels": _kernels()}
    elif is_installed(TRITON):  # whose kernels are tried out: with other versions other ones may have agreed
        traits |= {TRITON: version(TRITON)}
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
