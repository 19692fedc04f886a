"""One node as `splitserve doctor` measures it: an engine in a process of its own, on its own cores.

`python -m splitserve_bench.doctor.node TASK` takes a JSON object with the fields of NodeTask. It says how far it is,
and at the end what it found, one JSON object a line on stdout: {"progress": text}, {"figures": NodeFigures} or, when
the model or the sizes cannot be used, {"error": text}. When all is measured it goes on with the last of it until it is
killed, so that another one is beside a busy one all the time.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving_core.cpus import pin
from serving_core.errors import SplitServeError
from serving_core.settings import EngineSettings

SHORT_CONTEXT_TOKENS: Final = 128  # in the cache before the decode steps
LONG_CONTEXT_TOKENS: Final = 512
LONG_CONTEXTS: Final = 4  # requests at most whose steps are measured with the long context too


@dataclass(frozen=True, slots=True)
class NodeTask:
    """What a node measures: prompts, or decode steps. `cpus` are those of the node, in the form of --cpus."""

    settings: dict[str, Any]  # of EngineSettings, but for the size of the pool
    cpus: str
    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """The fastest repeats, which others on the machine disturb least. prompts_s of each length, steps_s of each batch
    with the short context, and long_step_s of long_batch requests with the long one; the latter three are of a node
    that measures decode steps."""

    description: dict[str, str]
    prompts_s: tuple[float, ...]
    steps_s: tuple[float, ...]
    long_batch: int
    long_step_s: float


Run = Callable[[], object]


def measure_node(task: NodeTask) -> tuple[NodeFigures, Run]:
    """In this process, whose cores are settled; with what runs the last of it again. Raises ModelError or
    SettingsError."""
    from engine.engine import Engine  # torch, whose threads are as many as there are cores when it is imported
    from serving_core.model_config import read_model_config
    from splitserve_bench.engine.driver import NUM_STEPS

    settings = EngineSettings(**task.settings)
    config = read_model_config(Path(settings.model))
    layout = config.kv_layout(settings.block_size, config.dtype)  # of blocks, only the number of tokens counts here
    long_batch = min(LONG_CONTEXTS, max(task.batches, default=0))
    num_blocks = max(
        layout.num_blocks_for(max(task.prompt_tokens, default=0)),
        max(task.batches, default=0) * layout.num_blocks_for(SHORT_CONTEXT_TOKENS + NUM_STEPS),
        long_batch * layout.num_blocks_for(LONG_CONTEXT_TOKENS + NUM_STEPS),
    )
    engine = Engine(dataclasses.replace(settings, num_kv_blocks=num_blocks))
    engine.warm_up()
    return _decode(engine, task, long_batch) if task.batches else _prompts(engine, task)


def main() -> None:
    """Does the task that is this process's argument."""
    fields = json.loads(sys.argv[1])
    lists = {name: tuple(fields[name]) for name in ("prompt_tokens", "batches")}
    task = NodeTask(**{**fields, **lists})
    try:
        pin(task.cpus)
        figures, run = measure_node(task)
        _say(figures=dataclasses.asdict(figures))
        while True:
            run()
    except SplitServeError as error:
        _say(error=str(error))


def _prompts(engine: Any, task: NodeTask) -> tuple[NodeFigures, Run]:
    from splitserve_bench.engine.driver import PromptRun
    from splitserve_bench.engine.sizes import PromptSize

    found = []
    for num_tokens in task.prompt_tokens:
        _say(progress=f"prompts of {num_tokens} tokens ...")
        prompt = PromptRun(engine, PromptSize(1, num_tokens))
        found.append(min(prompt.run_s() for _ in range(task.repeats)))
    return NodeFigures(engine.description, tuple(found), (), 0, 0.0), prompt.run_s


def _decode(engine: Any, task: NodeTask, long_batch: int) -> tuple[NodeFigures, Run]:
    steps_s, _ = _steps_s(engine, task.batches, SHORT_CONTEXT_TOKENS, task.repeats)
    [long_s], run = _steps_s(engine, (long_batch,), LONG_CONTEXT_TOKENS, task.repeats)
    return NodeFigures(engine.description, (), steps_s, long_batch, long_s), run


def _steps_s(
    engine: Any, batches: tuple[int, ...], context_tokens: int, repeats: int
) -> tuple[tuple[float, ...], Callable[[], float]]:
    """Of each batch; with what runs the steps of the last one again."""
    from splitserve_bench.engine.driver import DecodeRun

    _say(progress=f"computing {max(batches)} contexts of {context_tokens} tokens ...")
    run = DecodeRun(engine, max(batches), context_tokens)
    run.extend(context_tokens)

    def step_s(batch: int) -> float:
        run.rewind(batch)
        return run.run_s(batch)

    found = []
    for batch in batches:
        _say(progress=f"decode steps of {batch} requests at {context_tokens} tokens ...")
        found.append(min(step_s(batch) for _ in range(repeats)))
    return tuple(found), lambda: step_s(batches[-1])


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
