"""What steps read of weights that are elsewhere."""

import statistics

from engine.engine import Engine
from engine.model.llama import LlamaDecoder
from splitserve_bench.engine.driver import NUM_STEPS, DecodeRun
from splitserve_bench.engine.figures import OffloadFigures


def measure_offload(engine: Engine, run: DecodeRun, repeats: int) -> OffloadFigures | None:
    """Decode steps of one request; None: all weights are where they compute."""
    offloaded = engine.model.offloaded if isinstance(engine.model, LlamaDecoder) else None
    if offloaded is None:
        return None
    steps_s, num_bytes = [], 0
    for _ in range(repeats):
        run.rewind(1)
        before = offloaded.num_read_bytes
        steps_s.append(run.run_s(1))
        num_bytes += offloaded.num_read_bytes - before
    step_bytes, step_s = num_bytes / repeats / NUM_STEPS, statistics.median(steps_s)
    alone_bytes, alone_s = offloaded.read_alone()
    sizes, alone = offloaded.layer_bytes.values(), alone_bytes / alone_s
    return OffloadFigures(offloaded.where, len(sizes), sum(sizes), step_bytes, step_s, step_bytes / step_s, alone)
