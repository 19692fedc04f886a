"""What `splitserve bench device` does, in order: what it needs most comes first. Torch-free.

Each step is a program of its own that prints one JSON object as its last line, so that what breaks one breaks no other.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

DEVICE, ENGINE, TESTS, SPLIT, TRANSFER, NOTHING = "device", "engine", "tests", "split", "transfer", ""
ATTENTION: Final = "attention"
DRAWING: Final = "drawing"

MODEL: Final = "model"  # the step that writes it
GPU_TESTS: Final = Path("tests/gpu")
JUNIT_FILE: Final = "gpu_tests.xml"
PEER_FILE: Final = "vllm.json"
HOST_TRANSPORTS: Final = ("zmq-shm", "zmq-tcp")
OFFLOAD_LIMIT: Final = "8GiB"  # half of the default shape's weights


@dataclass(frozen=True, slots=True)
class Step:
    """One program, and how to read what it tells."""

    name: str
    kind: str  # of its figures
    arguments: tuple[str, ...]  # of Python
    limit_s: float
    shown: str  # the command that does the same
    why_not: str = ""  # it is not done here, and why
    environment: Mapping[str, str] = field(default_factory=dict)
    peer: Path | None = None  # a file of an earlier step, passed as --peer-json where it was written

    @property
    def argv(self) -> list[str]:
        """As things are now."""
        peer = ("--peer-json", str(self.peer)) if self.peer is not None and self.peer.is_file() else ()
        return [sys.executable, *self.arguments, *peer]


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which steps there are: how many CUDA devices, which and what the first one is, whether vLLM can be
    imported, and whether the tests are here."""

    num_devices: int
    first_device: str
    device_name: str
    has_vllm: bool
    has_tests: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured, as of the flags of the benches. `few_*` are for what is compared with the rest."""

    shape: str
    layers: int
    prompts: str
    batches: str
    contexts: str
    few_prompts: str
    few_batches: str
    few_contexts: str
    long_context: str
    repeats: int
    block_size: int
    step_tokens: int
    transfer_tokens: str
    split_prompt_tokens: int
    split_output_tokens: int
    split_prompts: int
    split_pool: str

    @property
    def model(self) -> tuple[str, ...]:
        """Of `bench engine`."""
        return ("--shape", self.shape, *(("--layers", str(self.layers)) if self.layers else ()))


def full_sizes(shape: str, layers: int) -> Sizes:
    """What the aims are about."""
    return Sizes(
        shape=shape,
        layers=layers,
        prompts="1x1024,16x128,1x4096",
        batches="1,16,64",
        contexts="128,512,2048",
        few_prompts="1x1024",
        few_batches="1,16",
        few_contexts="512",
        long_context="16384",
        repeats=5,
        block_size=256,
        step_tokens=4096,
        transfer_tokens="2048",
        split_prompt_tokens=1024,
        split_output_tokens=64,
        split_prompts=8,
        split_pool="8GiB",
    )


def trial_sizes(shape: str, layers: int) -> Sizes:
    """Tiny ones, which show that a step can be done."""
    return Sizes(
        shape=shape,
        layers=layers,
        prompts="1x48,4x16",
        batches="1,2",
        contexts="16,32",
        few_prompts="1x16",
        few_batches="1",
        few_contexts="16",
        long_context="48",
        repeats=1,
        block_size=16,
        step_tokens=64,
        transfer_tokens="32",
        split_prompt_tokens=24,
        split_output_tokens=4,
        split_prompts=2,
        split_pool="32MiB",
    )


def steps_of(sizes: Sizes, machine: Machine, model: Path, out: Path) -> list[Step]:
    """All of them, in order. `model` is where the model is written, `out` where the report is."""
    folder = str(model)
    sized = ("-m", "splitserve_bench.device.model", sizes.shape, str(sizes.layers), folder)
    no_vllm = "" if machine.has_vllm else "vLLM cannot be imported here"
    vllm = ("-m", "splitserve_bench.device.vllm_peer", folder, sizes.prompts, sizes.batches, sizes.contexts)
    by_device = ("torch_dist-nccl",) if machine.num_devices > 1 else ("torch_dist-ipc",)
    no_device = "" if machine.num_devices else "there is no CUDA device here"
    several = "" if machine.num_devices > 1 else f"there are {machine.num_devices} CUDA devices here, and it takes two"
    return [
        _step("device", DEVICE, ("-m", "splitserve_bench.device.facts"), 60),
        _step(MODEL, NOTHING, sized, 240),
        _step("vllm", NOTHING, (*vllm, str(out / PEER_FILE)), 240, no_vllm),
        replace(_engine("engine", sizes, folder, (), few=False), peer=out / PEER_FILE),
        _tests(machine, out),
        _engine("eager", sizes, folder, ("--enforce-eager",)),
        _split("split-1", sizes, folder, "", {"CUDA_VISIBLE_DEVICES": machine.first_device}),
        _attention(sizes),
        _step("drawing", DRAWING, ("-m", "splitserve_bench.device.drawing", sizes.shape, sizes.batches), 60),
        _engine("long-context", sizes, folder, (), contexts=sizes.long_context),
        _transfer("transfer", sizes, folder, machine, HOST_TRANSPORTS),
        _transfer("transfer-device", sizes, folder, machine, by_device, no_device),
        _engine("blocks-16", sizes, folder, ("--block-size", "16")),
        _engine("invariant", sizes, folder, ("--batch-invariant",)),
        _engine("kv-int8", sizes, folder, ("--kv-cache-dtype", "int8")),
        _engine("kv-fp8", sizes, folder, ("--kv-cache-dtype", "fp8_e4m3")),
        _engine("weights-int8", sizes, folder, ("--quantization", "int8")),
        _engine("weights-int4", sizes, folder, ("--quantization", "int4")),
        _engine("weights-w8a8", sizes, folder, ("--quantization", "w8a8")),
        _engine("weights-elsewhere", sizes, folder, ("--weights-memory-bytes", OFFLOAD_LIMIT)),
        _split("split-2", sizes, folder, several, {}),
    ]


def _step(name: str, kind: str, arguments: tuple[str, ...], limit_s: float, why_not: str = "") -> Step:
    return Step(name, kind, arguments, limit_s, shlex.join(["python", *arguments]), why_not)


def _engine(
    name: str, sizes: Sizes, folder: str, flags: tuple[str, ...], *, few: bool = True, contexts: str = ""
) -> Step:
    """`bench engine` with these flags beside those of all."""
    counts = (sizes.few_prompts, sizes.few_batches, contexts or sizes.few_contexts)
    prompts, batches, contexts = counts if few else (sizes.prompts, sizes.batches, sizes.contexts)
    measured = ("--prompts", prompts, "--batches", batches, "--contexts", contexts, "--repeats", str(sizes.repeats))
    block_size = () if "--block-size" in flags else ("--block-size", str(sizes.block_size))
    steps = ("--max-num-batched-tokens", str(sizes.step_tokens), "--shared-steps", "--json")
    rest = (*measured, *block_size, *steps, *flags)
    shown = shlex.join(["splitserve", "bench", "engine", *sizes.model, *rest])
    arguments = ("-m", "splitserve_bench", "engine", folder, *rest)
    return Step(name, ENGINE, arguments, 120 if few else 270, shown)


def _attention(sizes: Sizes) -> Step:
    counts = (sizes.batches, f"{sizes.contexts},{sizes.long_context}", str(sizes.step_tokens), str(sizes.block_size))
    return _step("attention", ATTENTION, ("-m", "splitserve_bench.device.attention", sizes.shape, *counts), 90)


def _tests(machine: Machine, out: Path) -> Step:
    arguments = ("-m", "pytest", str(GPU_TESTS), "-q", "-p", "no:cacheprovider", f"--junitxml={out / JUNIT_FILE}")
    why_not = "" if machine.has_tests else f"there is no folder {GPU_TESTS} here"
    return _step("tests", TESTS, arguments, 360, why_not)


def _split(name: str, sizes: Sizes, folder: str, why_not: str, environment: Mapping[str, str]) -> Step:
    counts = (sizes.split_prompts, sizes.split_prompt_tokens, sizes.split_output_tokens, sizes.block_size)
    arguments = ("-m", "splitserve_bench.device.split", folder, *map(str, counts), sizes.split_pool)
    shown = shlex.join([*(f"{key}={value}" for key, value in environment.items()), "python", *arguments])
    return Step(name, SPLIT, arguments, 240, shown, why_not, environment)


def _transfer(
    name: str, sizes: Sizes, folder: str, machine: Machine, transports: Sequence[str], why_not: str = ""
) -> Step:
    device = "cuda" if machine.num_devices else "cpu"
    flags = [word for transport in transports for word in ("--transport", transport)]
    sized = ("--prompt-tokens", sizes.transfer_tokens, "--block-size", str(sizes.block_size))
    rest = (*flags, *sized, "--repeats", str(sizes.repeats), "--device", device, "--json")
    shown = shlex.join(["splitserve", "bench", "transfer", "MODEL", *rest])
    return Step(name, TRANSFER, ("-m", "splitserve_bench", "transfer", folder, *rest), 120, shown, why_not)
