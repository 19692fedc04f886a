"""Measure and test what needs a CUDA device, in one report: `python -m splitserve_bench.device --out report`.

Each step is a process of its own with a time limit, so that a step that fails or hangs leaves the others alone.
report.json and report.md have what each step printed as soon as it ends; the same command continues where it stopped.
`--trial` does each step in tiny sizes, also on a CPU.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import torch

from engine.attention.backends import choose_attention
from engine.cache.kv_pool import PagedKVPool
from engine.cuda_graphs import CudaCapture
from engine.forward_batch import build_batch
from engine.parallel import choose_device
from serving_core.layout import KVLayout
from serving_core.process.memory import available_bytes
from serving_core.requests import Share
from serving_core.units import size_of
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel
from splitserve_bench.device_report import DONE, FAILED, OUT_OF_TIME, about_here, write_report
from splitserve_bench.engine.machine import least_s, measure_machine
from splitserve_bench.models import SHAPES, shape_of, write_random_model
from splitserve_bench.options import ListOf, option
from splitserve_bench.prompts import GREEDY, Prompts

DEFAULT_LIMIT_S: Final = 540.0
MIN_STEP_S: Final = 20.0  # a step that would get less is left for the next run
STOP_S: Final = 10.0  # from SIGINT, at which pytest prints its summary, to SIGKILL
NUM_LAST_LINES: Final = 25  # of what a step that was not done logged
CALLS_PER_CAPTURE: Final = 16
MODEL_WRITTEN: Final = "complete"  # the file that is written last
KERNEL_TESTS: Final = ("triton", "ops", "few_bits", "mixed", "sampling", "quantized_pool", "streams", "experts")
ENGINE_TESTS: Final = ("graphs", "engine", "ipc", "transfer", "faults", "features", "offload")
TEST_FLAGS: Final = (
    "-q -rfE -p no:cacheprovider -o filterwarnings=default -o timeout=60 --tb=short -n 8 --dist worksteal"
)
VARIANTS: Final = {  # steps that are `bench engine` with these flags
    "eager": "--enforce-eager",
    "invariant": "--batch-invariant",
    "kv-int8": "--kv-cache-dtype int8",
    "kv-fp8": "--kv-cache-dtype fp8_e4m3",
    "weights-int8": "--quantization int8",
    "weights-int4": "--quantization int4",
    "weights-w8a8": "--quantization w8a8",
    "weights-elsewhere": "--weights-memory-bytes 8GiB",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each step measures. `prompts`, `batches` and `contexts` are the flags of `splitserve bench engine`."""

    shape: str
    layers: int
    prompts: str = "1x1024,16x128,1x4096"
    batches: str = "1,16,64"
    contexts: str = "128,512,2048"
    step_tokens: int = 4096
    block_size: int = 256
    repeats: int = 5
    cluster_prompt_tokens: int = 1024
    cluster_pool_bytes: int = 2**33


TRIAL: Final = ("1x48,4x16", "1,2", "16,32", 64, 16, 1, 24, 2**25)


def print_device(sizes: Sizes, folder: Path) -> None:
    """Print the device, its FLOP/s in matrix products, and the rates of reading and copying its memory.

    The arguments, which every step has, are not used.
    """
    device = choose_device("auto")
    is_cuda = device.type == "cuda"
    machine = measure_machine(device, torch.bfloat16)
    print(torch.cuda.get_device_name() if is_cuda else "CPU", f"x {torch.cuda.device_count()}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {os.cpu_count()} CPUs")
    print(f"products of bfloat16: {machine.gemm_flops_per_s / 1e12:.1f} TFLOP/s")
    print(f"reading memory: {machine.read_bytes_per_s / 1e9:.0f} GB/s")
    num_bytes = min(2**30, available_bytes() // 8)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    one, other = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copies = (
        (2, "within memory, read and written", one, other),
        (1, "from host", one, host),
        (1, "to host", host, one),
    )
    for times, name, target, source in copies:
        seconds = least_s(partial(target.copy_, source, non_blocking=True), device)
        print(f"copying {name}: {times * num_bytes / seconds / 1e9:.1f} GB/s")


def write_model(sizes: Sizes, folder: Path) -> None:
    """Write a model of random weights in these sizes to the folder, unless it is complete there, and print its size."""
    if not (folder / MODEL_WRITTEN).exists():
        write_random_model(folder, shape_of(sizes.shape, sizes.layers))
        (folder / MODEL_WRITTEN).touch()
    print(folder, size_of(sum(path.stat().st_size for path in folder.iterdir())))


@torch.inference_mode()
def print_attention(sizes: Sizes, folder: Path) -> None:
    """Print the time that one layer's attention of a decode step takes, for each batch and context of `sizes`.

    On CUDA the calls are captured as a graph, so that the host's time does not count. `folder`, which every step has,
    is not used.
    """
    shape, device = SHAPES[sizes.shape], choose_device("auto")
    layout = KVLayout.uniform(1, shape.num_kv_heads, shape.head_dim, sizes.block_size, "bfloat16")
    counts = [(int(batch), int(tokens)) for batch in sizes.batches.split(",") for tokens in sizes.contexts.split(",")]
    pool = PagedKVPool(layout, max(batch * layout.num_blocks_for(tokens) for batch, tokens in counts), device)
    backend = choose_attention(pool, shape.num_heads)
    pool.try_values(0, pool.num_blocks)
    for batch, tokens in counts:
        each = layout.num_blocks_for(tokens)
        shares = [Share([0], tokens - 1, range(row * each, (row + 1) * each), samples=True) for row in range(batch)]
        plan = backend.plan(build_batch(shares, layout.block_size, device), None)
        query = torch.randn(batch, shape.num_heads, shape.head_dim, device=device).to(pool.compute_dtype)

        def calls(query: torch.Tensor = query, plan: Any = plan) -> None:
            for _ in range(CALLS_PER_CAPTURE):
                backend.attend(query, 0, plan)

        run = CudaCapture(device)(calls) if device.type == "cuda" else calls
        seconds = least_s(run, device) / CALLS_PER_CAPTURE
        rate = batch * tokens * layout.token_bytes / seconds / 1e9
        print(f"{backend.name}, batch {batch}, context {tokens}: {seconds * 1e3:.4f} ms, {rate:.0f} GB/s")


def print_split(sizes: Sizes, folder: Path) -> None:
    """Print how many greedy outputs of a prefill node and a decode node equal those of one mixed node, and their times.

    `folder` has the model. One request at a time has steps of the same shapes in both clusters, so that all outputs
    must be equal.
    """
    together, apart = (asyncio.run(_outputs(sizes, folder, **nodes)) for nodes in ({"mixed": 1}, {}))
    print(f"outputs equal to those of one node: {sum(map(list.__eq__, together, apart))} of {len(apart)}")


async def _outputs(sizes: Sizes, folder: Path, **nodes: int) -> list[list[int]]:
    passed = {"block_size": sizes.block_size, "kv_cache_memory_bytes": sizes.cluster_pool_bytes}
    settings = ClusterSettings(grpc_port=free_port(), http_port=NO_HTTP, **nodes)  # type: ignore[arg-type]
    model, outputs = LocalModel(folder, folder.name), list[list[int]]()
    async with Cluster(settings, passed, model, report=print) as cluster, cluster.client() as client:
        await cluster.start(lambda missing: None)
        prompts = Prompts((await client.model_info()).vocab_size, sizes.cluster_prompt_tokens)
        for _ in range(1 + sizes.repeats):  # the first one pays for first calls
            outputs.append([])
            async for chunk in client.generate(prompts.draw(), max_tokens=32, **GREEDY):
                outputs[-1] += chunk.token_ids
                if chunk.completion is not None:
                    print(", ".join(cluster.nodes), chunk.completion.timeline)
    return outputs


OWN_STEPS: Final[Mapping[str, Callable[[Sizes, Path], None]]] = {
    "device": print_device,
    "model": write_model,
    "attention": print_attention,
    "split-1": print_split,
}


def steps_of(sizes: Sizes, folder: Path, own: Sequence[str]) -> dict[str, tuple[float, list[str]]]:
    """Return by its name, the most telling first, each step's time limit in seconds and its arguments to `python`.

    `own` are the arguments that run a step of this script, without the step's name.
    """
    is_cuda, is_alone = torch.cuda.is_available(), torch.cuda.device_count() == 1
    transport = ("torch_dist-ipc" if is_alone else "torch_dist-nccl") if is_cuda else "zmq-shm"
    bench = ["-m", "splitserve_bench"]
    engine = (
        f"--prompts {sizes.prompts} --batches {sizes.batches} --contexts {sizes.contexts} --repeats {sizes.repeats}"
    )
    engine += f" --block-size {sizes.block_size} --max-num-batched-tokens {sizes.step_tokens}"
    transfer = f"--transport {transport} --device {'cuda' if is_cuda else 'cpu'} --block-size {sizes.block_size}"
    transfer += f" --prompt-tokens {sizes.cluster_prompt_tokens}"
    measured = [*bench, "engine", str(folder), *engine.split()]
    return {
        "device": (30.0, [*own, "--only", "device"]),
        "tests-kernels": (90.0, tests_of(KERNEL_TESTS)),
        "model": (60.0, [*own, "--only", "model"]),
        "engine": (110.0, measured),
        "tests-engines": (80.0, tests_of(ENGINE_TESTS)),
        "split-1": (80.0, [*own, "--only", "split-1"]),
        "transfer-device": (40.0, [*bench, "transfer", str(folder), *transfer.split()]),
        "attention": (40.0, [*own, "--only", "attention"]),
        **{name: (60.0, [*measured, *flags.split()]) for name, flags in VARIANTS.items()},
        "tests-invariant": (240.0, tests_of(("invariant",))),
    }


def tests_of(names: Sequence[str]) -> list[str]:
    """Return the arguments to `python` that run the test files of these names in tests/gpu."""
    return ["-m", "pytest", *TEST_FLAGS.split(), *(f"tests/gpu/test_cuda_{name}.py" for name in names)]


def run_step(arguments: Sequence[str], limit_s: float, log: Path) -> dict[str, Any]:
    """Run `python` with these arguments to its end; return "state", "seconds", "command", "output" and "log".

    The state is DONE, FAILED after an exit code other than 0, or OUT_OF_TIME: after `limit_s` seconds the process and
    its children are interrupted, and STOP_S seconds later killed. "output" is its stdout, as text. Its stderr is
    written to the file `log`; "log" has the last lines of it, and is empty if the state is DONE.
    """
    start_s, state, command = time.monotonic(), "", [sys.executable, *arguments]
    child = [sys.executable, "-m", "serving_core.process.child", str(os.getpid()), *command]
    with log.open("w") as stderr:
        process = subprocess.Popen(child, stdout=subprocess.PIPE, stderr=stderr, text=True, process_group=0)
    for number, patience_s in ((signal.SIGINT, limit_s), (signal.SIGKILL, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            output, _ = process.communicate(timeout=patience_s)
            break
        except subprocess.TimeoutExpired:
            output, state = "", OUT_OF_TIME
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    state = state or (FAILED if process.returncode else DONE)
    last = [] if state == DONE else log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
    seconds = round(time.monotonic() - start_s, 1)
    return {"state": state, "seconds": seconds, "command": ["python", *arguments], "output": output, "log": last}


@click.command(help=__doc__)
@option("--out", default="device-report", type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", "names", default=None, type=ListOf("NAME,NAME,...", str), help="Only these, also if done.")
@option("--limit-s", default=DEFAULT_LIMIT_S, type=click.FloatRange(1.0), help="For all steps together.")
@option("--shape", default="llama-3.1-8b", type=click.Choice(tuple(SHAPES)))
@click.option("--layers", default=0, type=click.IntRange(0), help="Take only this many layers of the --shape.")
@click.option("--scratch", default=tempfile.gettempdir(), help="Folder for the model of random weights, which stays.")
@option("--trial", is_flag=True, help="Tiny sizes, also without a device.")
@option("--only", default="", hidden=True)
def main(
    out: Path,
    names: tuple[str, ...] | None,
    limit_s: float,
    shape: str,
    layers: int,
    scratch: str,
    *,
    trial: bool,
    only: str,
) -> None:
    sizes = Sizes(shape, layers, *(TRIAL if trial else ()))
    folder = Path(scratch).absolute() / f"splitserve-device-{shape}-{layers}"
    if only:
        OWN_STEPS[only](sizes, folder)
        return
    if not (trial or torch.cuda.is_available()):
        raise click.UsageError("there is no CUDA device here; --trial does all steps in tiny sizes without one")
    flags = ("--shape", shape, "--layers", str(layers), "--scratch", scratch, *(["--trial"] if trial else []))
    steps = steps_of(sizes, folder, ("-m", "splitserve_bench.device", *flags))
    if unknown := [name for name in names or () if name not in steps]:
        raise click.UsageError(f"--steps: there is no step {unknown[0]!r}, but {', '.join(steps)}")
    title = f"{shape}, {layers or 'all'} layers{', a trial' if trial else ''} on {about_here()['device']}"
    out.mkdir(parents=True, exist_ok=True)
    path, done = out / "report.json", dict[str, Any]()
    if path.exists() and (found := json.loads(path.read_text())):
        done = found["steps"]
        if found["title"] != title:
            raise click.UsageError(f"--out: the report there is of {found['title']}, and this is {title}")
    end_s = time.monotonic() + limit_s
    for name, (step_limit_s, arguments) in steps.items():
        if name not in names if names else name in done and done[name]["state"] == DONE:
            continue
        left_s = min(end_s - time.monotonic(), step_limit_s)
        if left_s < min(MIN_STEP_S, limit_s):
            print(f"{name}: not reached, the {limit_s:g} s of --limit-s are over")
            continue
        done[name] = run_step(arguments, left_s, out / f"{name}.log")
        write_report(out, title, {each: done[each] for each in steps if each in done})
        print(f"{name}: {done[name]['state']}, {done[name]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
