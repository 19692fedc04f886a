"""`python -m splitserve_bench.device.drawing SHAPE BATCHES`: how long it takes to draw the tokens of a decode step from
the nucleus of a whole vocabulary, by the steps that the engine would take and by torch's, as one JSON list."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Final

import torch

from engine.model.draws import Draw
from engine.model.step_backends import choose_steps
from engine.model.steps import Steps, TorchSteps
from engine.parallel import choose_device
from splitserve_bench.engine.machine import least_s
from splitserve_bench.engine.random_models import SHAPES

TOP_P: Final = 0.9


@dataclass(frozen=True, slots=True)
class DrawFigures:
    """Of one step's tokens, logits being there."""

    backend: str
    batch: int
    seconds: float


@torch.inference_mode()
def measure_draws(shape: str, batches: list[int], device: torch.device) -> list[DrawFigures]:
    """Logits are of normal numbers, spread as a model's."""
    backends: list[Steps] = [choose_steps(device)]
    if type(backends[0]) is not TorchSteps:
        backends.append(TorchSteps())
    return [_measure(steps, batch, SHAPES[shape].vocab_size, device) for batch in batches for steps in backends]


def _measure(steps: Steps, batch: int, vocab_size: int, device: torch.device) -> DrawFigures:
    logits = torch.randn(batch, vocab_size, device=device).mul_(3).bfloat16()
    highest, _ = steps.likeliest(logits)
    draws = [Draw(row, (row + 0.5) / batch, 1.0, top_p=TOP_P) for row in range(batch)]
    seconds = least_s(lambda: steps.draw(logits, highest, draws), device)
    return DrawFigures(type(steps).__name__, batch, seconds)


def main() -> None:
    shape, batches = sys.argv[1:]
    figures = measure_draws(shape, [int(batch) for batch in batches.split(",")], choose_device("auto"))
    print(json.dumps([dataclasses.asdict(each) for each in figures]))


if __name__ == "__main__":
    main()
