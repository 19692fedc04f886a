"""llama.cpp's own speculation, on the prompts that we answer one at a time: a process of a Python that has it."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving_core.errors import SettingsError
from serving_core.model_config import read_model_config
from splitserve_bench.speculation.texts import prompts_of, sampling_of

SCRIPT: Final = Path(__file__).with_name("llama_peer.py")
TIMEOUT_S: Final = 900.0  # for one prompt


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Where it is: a Python with llama-cpp-python, and the model's weights in its format."""

    python: str
    weights: Path

    def answer(self, question: dict[str, Any]) -> dict[str, float]:
        """Raises SettingsError, with what it said last, where it does not answer."""
        command = [self.python, str(SCRIPT), str(self.weights)]
        try:
            done = subprocess.run(
                command, input=json.dumps(question), capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
        except OSError as error:
            raise SettingsError(f"--llama-cpp {self.python} does not start: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise SettingsError(f"llama.cpp has not answered a prompt within {TIMEOUT_S:.0f} s") from error
        except subprocess.CalledProcessError as error:
            said = (error.stderr.strip().splitlines() or ["nothing"])[-1]
            raise SettingsError(f"llama.cpp failed with {error.returncode}; it said last: {said}") from error
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """Answers of one kind of prompt, one at a time. As of SpeculationFigures."""

    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float


def measure_peer(
    peer: LlamaCpp,
    folder: Path,
    kind: str,
    num_candidates: int,
    max_tokens: int,
    repeats: int,
    threads: int,
    report: Callable[[str], None],
) -> PeerFigures:
    """Of the first prompt of this kind for the model of the folder. Raises SettingsError."""
    sampling = sampling_of(kind, max_tokens)
    question = {
        "prompt": prompts_of(kind, folder, 1)[0],
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "eos_token_ids": [] if sampling.ignore_eos else read_model_config(folder).eos_token_ids,
        "num_candidates": num_candidates,
        "repeats": repeats,
        "threads": threads,
    }
    figures = PeerFigures(**peer.answer(question))
    report(f"{kind}, llama.cpp: {figures.speedup:.2f} times as fast")
    return figures
