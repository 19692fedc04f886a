"""Check a cluster whose nodes run vLLM before its processes start, and say what was chosen for it."""

import importlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from serving_core.errors import SettingsError
from serving_core.flags import fields_of
from serving_core.model_files.config import read_model_config
from serving_core.model_files.weight_files import is_gguf
from splitserve.launch.cluster import (
    COORDINATOR,
    OWN,
    PLANNED,
    VLLM_PACKAGE,
    ClusterSettings,
    Process,
    node_rooms,
    up_settings_class,
)
from splitserve.launch.preflight import check_coordinator

CHECK: Final = f"from {VLLM_PACKAGE}.seam import release; release()"
CHECK_DEADLINE_S: Final = 60.0
SIZES: Final = ("prefill_tp", "decode_tp", "mixed_tp", "prefill_pp", "decode_pp", "mixed_pp")


def check_given(settings: ClusterSettings, passed: Mapping[str, Any]) -> None:
    """Raise SettingsError for flags of `splitserve up` that its engine does not have. `passed` are their values."""
    if settings.engine == OWN:
        if settings.vllm_python or settings.vllm_flag:
            raise SettingsError("--vllm-python, --vllm-flag and what follows -- need --engine vllm")
        return
    if settings.ray:
        raise SettingsError("--engine vllm starts nodes on this machine alone: --ray cannot be given too")
    rooms = (COORDINATOR, *node_rooms(settings.engine))
    known = {field.name for room in rooms for field, _ in fields_of(room.settings_class)}
    ours = {field.name: field.default for field, _ in fields_of(up_settings_class())}
    refused = [name for name in SIZES if getattr(settings, name) != 1]
    for name, default in ours.items():
        if name not in known | PLANNED and passed.get(name, default) != default:
            refused.append(name)
    if refused:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise SettingsError(f"{names}: not for --engine vllm, whose own flags follow --")


def check_vllm_processes(processes: Sequence[Process]) -> None:
    """Raise SettingsError or ModelError if a planned process would not start, as far as known without vLLM.

    The coordinator is the first of `processes`; the others have vLLM, all in one environment.
    """
    folder, config = check_coordinator(processes[0].settings)
    if config.embedder is not None:
        raise SettingsError("nodes with vLLM make no embeddings")
    if is_gguf(folder):
        raise SettingsError(f"--engine vllm needs a MODEL with safetensors files, and {folder} is of a GGUF file")
    argv = processes[1].argv
    importlib.import_module(f"{VLLM_PACKAGE}.settings").check_vllm_flags(argv[argv.index("--") + 1 :])
    _check_python(argv[0])


def _check_python(python: str) -> None:
    """Raise SettingsError unless this interpreter has a tested vLLM, and SplitServe."""
    try:
        done = subprocess.run(
            [python, "-c", CHECK], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=CHECK_DEADLINE_S
        )
    except OSError as error:
        raise SettingsError(f"--vllm-python {python} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SettingsError(f"--vllm-python {python} says nothing within {CHECK_DEADLINE_S:g} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        sentence = said[-1].partition("Error: ")[2] or said[-1]
        raise SettingsError(
            f"--engine vllm needs --vllm-python, a Python with vLLM and SplitServe; {python}: {sentence}"
        )


def vllm_choices(processes: Sequence[Process], num_nodes: Mapping[str, int]) -> list[str]:
    """Return the lines that say what was chosen for planned processes, the coordinator first."""
    coordinator, node = processes[0].settings, processes[1]
    config = read_model_config(Path(coordinator.model), coordinator.model_impl, coordinator.runner)
    flags = " ".join(node.argv[node.argv.index("--") + 1 :])
    counts = ", ".join(f"{number} {role}" for role, number in num_nodes.items() if number)
    python = "" if node.argv[0] == sys.executable else f" of {node.argv[0]}"
    return [
        f"Model: {config.architecture} by vLLM{python}, with its flags {flags or '(none)'}.",
        f"Nodes: {counts}; KV goes {'through shared memory' if node.settings.kv_shared_memory else 'over ZeroMQ'}.",
    ]
