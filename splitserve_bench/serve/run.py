"""Run `splitserve bench serve` once: connect, warm up, send the load, and report it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from serving_core.errors import SettingsError
from serving_core.model_files.tokenizer_files import TOKENIZER_FILE
from splitserve.commands.terminal import report
from splitserve.launch.models import HUB_ID
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.command import CAPACITY_CONCURRENCY, SESSIONS, TEXTS, ServeOptions
from splitserve_bench.serve.generator import Order, describe, run_load
from splitserve_bench.serve.metrics import parse_goodput, summarize, with_limits
from splitserve_bench.serve.records import Outcome, PlannedRequest, Target
from splitserve_bench.serve.report import Reporting, capacity_line, shown_progress
from splitserve_bench.serve.workload import (
    Workload,
    as_texts,
    capacity_load,
    capacity_per_s,
    vocab_size_of,
    warm_up_of,
    workload_of,
)


async def serve(options: ServeOptions) -> None:
    """Send the load that the options describe, and print and save its figures.

    Raises SettingsError for options that do not go together, and BenchError when the server does not reply, the load
    breaks off or no request is complete. When it is stopped, the requests that ended are reported.
    """
    options.check_flags()
    options.check_pace()
    reporting, limits = Reporting(options), parse_goodput(options.goodput)
    loader = await connect(options)
    options = loader.options
    if options.wants_capacity:
        options = replace(options, request_rate=await loader.capacity_per_s())
    workload = workload_of(options, loader.max_model_len, loader.vocab_size)
    await loader.warm_up(workload, options.num_warmups)
    run = reporting.begin(loader.target.model, workload, options.request_rate)
    planned = with_limits(workload.planned, lambda each: limits) if options.send_limits else workload.planned
    came: list[Outcome] = []
    try:
        outcomes = await loader.send(
            planned,
            loader.target.model,
            came.append,
            max_concurrency=options.max_concurrency,
            obey_retry_after=options.obey_retry_after,
        )
    except (asyncio.CancelledError, BenchError):
        reporting.show_stopped(came, len(planned), run)
        raise
    reporting.show(outcomes, run)
    summary = summarize(outcomes, limits)
    if not summary.num_completed:
        raise BenchError(f"none of the {len(outcomes)} requests has a complete output: {summary.frequent_errors[0][0]}")


@dataclass(frozen=True, slots=True)
class Loader:
    """A server that has replied, and what it serves."""

    options: ServeOptions
    target: Target
    max_model_len: int | None
    vocab_size: int

    async def capacity_per_s(self) -> float:
        """Measure how many requests a second the server serves in a closed loop, after a warm-up; report and return it.

        Raises BenchError when some fail.
        """
        workload = capacity_load(self.options, self.max_model_len, self.vocab_size)
        await self.warm_up(workload, CAPACITY_CONCURRENCY)
        rate = capacity_per_s(await self.send(workload.planned, "capacity", max_concurrency=CAPACITY_CONCURRENCY))
        report(capacity_line(rate))
        return rate

    async def warm_up(self, workload: Workload, count: int) -> None:
        """Send `count` requests like the load's first ones, which do not count; report how many failed."""
        planned = warm_up_of(workload, count, self.vocab_size, self.options.seed)
        if not planned:
            return
        outcomes = await self.send(planned, "warm-up", max_concurrency=self.options.max_concurrency)
        if num_failed := sum(bool(outcome.error) for outcome in outcomes):
            report(f"{num_failed} of {len(planned)} requests of the warm-up failed")

    async def send(
        self,
        planned: Sequence[PlannedRequest],
        label: str,
        on_outcome: Callable[[Outcome], None] | None = None,
        *,
        max_concurrency: int | None,
        obey_retry_after: int = 0,
    ) -> list[Outcome]:
        """Send a load and return its outcomes; `on_outcome` is called for each outcome as it comes.

        At most `max_concurrency` requests run at a time (None: any number), and a refused one is sent again at most
        `obey_retry_after` times. `label` begins the line that shows the progress. Raises BenchError when the load
        breaks off.
        """
        if self.target.takes_chats and self.options.tokenizer is not None:
            planned = as_texts(planned, self.options.tokenizer)
        with shown_progress(label) as on_progress:
            order = Order(self.target, max_concurrency, self.options.request_timeout_s, obey_retry_after)
            return await run_load(order, planned, on_progress, on_outcome)


async def connect(options: ServeOptions) -> Loader:
    """Ask the server what it serves, and return it with the options, whose tokenizer is found when needed.

    Raises BenchError when the server does not reply, and SettingsError for flags that contradict one another and for
    texts whose tokenizer is not found.
    """
    target = options.where()
    served = await describe(target)
    users = [f"--dataset-name {options.dataset_name}"] if options.dataset_name in TEXTS else []
    users += [f"--endpoint {target.endpoint}"] if target.takes_chats else []
    if users and options.tokenizer is None:
        options = replace(options, tokenizer=_tokenizer_of(served.model))
        if options.tokenizer is None:
            raise SettingsError(
                f"{users[0]} needs the model's tokenizer, which is not on this machine under the name {served.model}: "
                "give --tokenizer FOLDER"
            )
        report(f"tokenizer: {options.tokenizer}")
    if options.dataset_name == SESSIONS and options.dataset_path is not None and options.tokenizer is None:
        options = replace(options, tokenizer=_tokenizer_of(served.model))  # for files with texts
    vocab_size = vocab_size_of(options, served, report)
    return Loader(options, replace(target, model=served.model), served.max_model_len, vocab_size)


def _tokenizer_of(model: str) -> Path | None:
    """Return the folder of a served model whose name is a folder on this machine, or a cached hub id; else None."""
    if (Path(model) / TOKENIZER_FILE).is_file():
        return Path(model)
    cached = try_to_load_from_cache(model, TOKENIZER_FILE) if HUB_ID.fullmatch(model) else None
    return Path(cached).parent if isinstance(cached, str) else None
