"""What steps read of weights that are on disk."""

import statistics

from engine.engine import Engine
from engine.model.llama import LlamaDecoder
from splitserve_bench.engine.driver import NUM_STEPS, DecodeRun
from splitserve_bench.engine.figures import DiskFigures


def measure_disk(engine: Engine, run: DecodeRun, repeats: int) -> DiskFigures | None:
    """Decode steps of one request; None: all weights are in memory."""
    on_disk = engine.model.on_disk if isinstance(engine.model, LlamaDecoder) else None
    if on_disk is None:
        return None
    steps_s, num_bytes = [], 0
    for _ in range(repeats):
        run.rewind(1)
        before = on_disk.num_read_bytes
        steps_s.append(run.run_s(1))
        num_bytes += on_disk.num_read_bytes - before
    step_bytes, step_s = num_bytes / repeats / NUM_STEPS, statistics.median(steps_s)
    alone_bytes, alone_s = on_disk.read_alone()
    sizes = on_disk.layer_bytes.values()
    return DiskFigures(len(sizes), sum(sizes), step_bytes, step_s, step_bytes / step_s, alone_bytes / alone_s)
