"""Describe what the bits of an engine's outputs depend on beside the model: kernels, ranks and the machine."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

import torch

from engine.native import library
from serving_core.process.extras import TRITON, is_installed

COUNTS: Final = "num_"  # torch's facts of cores and sockets, which the number of threads reflects
NOTHING_TO_KERNELS: Final = (  # keys of an engine's description that do not affect compiled kernels
    "threads",
    "program",
    "pp_size",
    "sequence_parallel_min_tokens",
    "layers_offloaded",
)


def numerics_facts(description: Mapping[str, str], device: torch.device, *, kernels_alone: bool) -> dict[str, str]:
    """Return facts that are equal for engines of one fingerprint that compute equal bits for equal steps; the inverse
    is not guaranteed.

    `description` is the engine's own. `kernels_alone` tells that compiled kernels compute every sum: then the number of
    threads, stages, tokens divided over two ranks and decode programs do not matter, and of the CPU only the
    instruction set does.
    """
    left_out = NOTHING_TO_KERNELS if kernels_alone else ()
    traits = {key: value for key, value in description.items() if key not in left_out} | {"torch": torch.__version__}
    if device.type == "cpu":
        traits |= {"cpu": _cpu(instructions_alone=kernels_alone), "kernels": _kernels()}
    elif is_installed(TRITON):  # Triton kernels are taken after a trial: other versions may choose other kernels
        traits |= {TRITON: version(TRITON)}
    return traits


def _cpu(*, instructions_alone: bool) -> str:
    """Return torch's description of the CPU, as words."""
    known = {key: value for key, value in torch.cpu.get_capabilities().items() if not key.startswith(COUNTS)}
    words = [key for key, value in known.items() if value is True]
    if not instructions_alone:
        words += [f"{key}={value}".replace(" ", "-") for key, value in known.items() if not isinstance(value, bool)]
    return " ".join(sorted(words))


def _kernels() -> str:
    """Return the usable kernel variants and the compiled libraries' identity: another compiler may add in another
    order.
    """
    path = library.library_path()
    digest = "none" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return " ".join((*library.wanted_variants(), digest))
