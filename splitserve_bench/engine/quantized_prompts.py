"""How fast prompts are read with weights as they are and quantized: in this process, in turn, so that what else the
machine does strikes all alike."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from engine.engine import Engine
from engine.model.layers import Linear
from serving_core.errors import SettingsError
from serving_core.model_config import FAKE_ARCHITECTURE, read_model_config
from serving_core.settings import INPUT_BITS, WEIGHT_BITS, EngineSettings
from serving_core.sharding import whole
from splitserve.launch.models import Report
from splitserve_bench.engine.costs import prompt_flops
from splitserve_bench.engine.driver import PromptRun
from splitserve_bench.engine.engine import threads
from splitserve_bench.engine.figures import PromptSize
from splitserve_bench.engine.machine import CPU_SHAPES, least_s

PLAIN: Final = "none"


@dataclass(frozen=True, slots=True)
class QuantizedPrompts:
    """Prompts of one size with one value of --quantization."""

    prompts: PromptSize
    quantization: str
    tokens_per_s: float  # the median
    ratio: float  # to the weights as they are: the median of those of each turn
    cpu_ratio: float  # the same of CPU time, which is steadier where others compute too
    product_flops_per_s: float  # what products with such weights reach alone
    product_share: float  # and what the prompts reach of it


@dataclass(frozen=True, slots=True)
class _Sample:
    wall_s: float
    cpu_s: float


def measure_quantized_prompts(
    folder: Path,
    quantizations: Sequence[str],
    sizes: Sequence[PromptSize],
    repeats: int,
    num_threads: int,
    report: Report,
) -> list[QuantizedPrompts]:
    """For each of the sizes a row for the weights as they are, and one for each of the quantizations. Raises ModelError
    or SettingsError when the model or the sizes cannot be used."""
    with threads(num_threads):
        return _measure(folder, quantizations, sizes, repeats, report)


def _measure(
    folder: Path, quantizations: Sequence[str], sizes: Sequence[PromptSize], repeats: int, report: Report
) -> list[QuantizedPrompts]:
    config = read_model_config(folder)
    most_tokens = max(size.num_tokens for size in sizes)
    if config.architecture == FAKE_ARCHITECTURE:
        raise SettingsError("the fake model computes nothing that could be measured")
    if most_tokens > config.max_position_embeddings:
        raise SettingsError(f"{most_tokens} tokens are more than the model's {config.max_position_embeddings}")
    layout = config.kv_layout(EngineSettings().block_size, config.dtype)
    num_blocks = max(size.count * layout.num_blocks_for(size.num_tokens) for size in sizes)
    engines, rates = {}, {}
    for name in (PLAIN, *quantizations):
        report(f"{folder.name}, --quantization {name} ...")
        engines[name] = Engine(EngineSettings(model=str(folder), quantization=name, num_kv_blocks=num_blocks))
        rates[name] = _product_flops_per_s(name, getattr(torch, engines[name].description["dtype"]))
    rows = []
    for size in sizes:
        report(f"prefill of {size.count} prompts of {size.num_tokens} tokens ...")
        samples = _in_turn(engines, size, repeats)
        flops = size.count * prompt_flops(config, size.num_tokens)
        for name, each in samples.items():
            median_s = statistics.median(sample.wall_s for sample in each)
            pairs = list(zip(samples[PLAIN], each, strict=True))
            rows.append(
                QuantizedPrompts(
                    size,
                    name,
                    tokens_per_s=size.count * size.num_tokens / median_s,
                    ratio=statistics.median(one.wall_s / other.wall_s for one, other in pairs),
                    cpu_ratio=statistics.median(one.cpu_s / other.cpu_s for one, other in pairs),
                    product_flops_per_s=rates[name],
                    product_share=flops / median_s / rates[name],
                )
            )
    return rows


def _in_turn(engines: dict[str, Engine], size: PromptSize, repeats: int) -> dict[str, list[_Sample]]:
    """Of each repeat."""
    runs = {name: PromptRun(engine, size) for name, engine in engines.items()}
    for engine in engines.values():
        PromptRun(engine, dataclasses.replace(size, count=1)).run_s()  # the first of its shapes
    samples: dict[str, list[_Sample]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, run in runs.items():
            start_s = time.process_time()
            wall_s = run.run_s()
            samples[name].append(_Sample(wall_s, time.process_time() - start_s))
    return samples


@torch.inference_mode()
def _product_flops_per_s(quantization: str, dtype: torch.dtype) -> float:
    """The best of several shapes, weights packed as the engine's."""
    rates = []
    for num_rows, num_inputs, num_outputs in CPU_SHAPES:
        layer = Linear(whole(num_inputs), {"out": whole(num_outputs)}, bias=False)
        layer.weight = torch.nn.Parameter(torch.randn(num_outputs, num_inputs).to(dtype), requires_grad=False)
        layer.pack(WEIGHT_BITS.get(quantization))
        layer.round_inputs(INPUT_BITS.get(quantization, 16))
        x = torch.randn(num_rows, num_inputs).to(dtype)
        rates.append(2 * num_rows * num_inputs * num_outputs / least_s(lambda x=x, layer=layer: layer(x), x.device))  # type: ignore[misc]
    return max(rates)
