"""A server that a command sends loads to, as its flags say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from splitserve.commands.terminal import report
from splitserve_bench.serve.load import describe, run_load
from splitserve_bench.serve.progress import shown_progress
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.serve_options import CAPACITY_CONCURRENCY, ServeOptions
from splitserve_bench.serve.stages_report import capacity_line
from splitserve_bench.serve.target import Target
from splitserve_bench.serve.workloads import (
    Workload,
    as_texts,
    capacity_load,
    capacity_per_s,
    vocab_size_of,
    warm_up_of,
)


@dataclass(frozen=True, slots=True)
class Session:
    """A server that has answered once, and what it serves."""

    options: ServeOptions
    target: Target
    max_model_len: int | None
    vocab_size: int

    @property
    def model(self) -> str:
        return self.target.model

    async def warm_up(self, workload: Workload) -> None:
        """Sends as many requests as are asked for, which do not count."""
        await self._warm_up(workload, self.options.num_warmups)

    async def capacity_per_s(self) -> float:
        """Measure how many requests a second the server answers in a closed loop, after a warm-up, and report it.
        Raises BenchError when some fail."""
        workload = capacity_load(self.options, self.max_model_len, self.vocab_size)
        await self._warm_up(workload, CAPACITY_CONCURRENCY)
        rate = capacity_per_s(await self._send(workload.planned, "capacity", max_concurrency=CAPACITY_CONCURRENCY))
        report(capacity_line(rate))
        return rate

    async def send(self, planned: Sequence[PlannedRequest], on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
        """What becomes of a load; `on_outcome` is told each as it comes. Raises BenchError when it breaks off."""
        return await self._send(
            planned,
            self.model,
            on_outcome,
            max_concurrency=self.options.max_concurrency,
            obey_retry_after=self.options.obey_retry_after,
        )

    async def _warm_up(self, workload: Workload, count: int) -> None:
        planned = warm_up_of(workload, count, self.vocab_size, self.options.seed)
        if not planned:
            return
        outcomes = await self._send(planned, "warm-up", max_concurrency=self.options.max_concurrency)
        if num_failed := sum(bool(outcome.error) for outcome in outcomes):
            report(f"{num_failed} of {len(planned)} requests of the warm-up failed")

    async def _send(
        self,
        planned: Sequence[PlannedRequest],
        label: str,
        on_outcome: Callable[[Outcome], None] | None = None,
        *,
        max_concurrency: int | None,
        obey_retry_after: int = 0,
    ) -> list[Outcome]:
        if self.target.takes_chats and self.options.tokenizer is not None:
            planned = as_texts(planned, self.options.tokenizer)
        with shown_progress(label) as on_progress:
            return await run_load(
                self.target,
                planned,
                max_concurrency=max_concurrency,
                request_timeout_s=self.options.request_timeout_s,
                on_progress=on_progress,
                on_outcome=on_outcome,
                obey_retry_after=obey_retry_after,
            )


async def connect(options: ServeOptions) -> Session:
    """Raises BenchError when nobody answers, and SettingsError for flags that contradict one another."""
    target = options.where()
    served = await describe(target)
    vocab_size = vocab_size_of(options, served, report)
    return Session(options, replace(target, model=served.model), served.max_model_len, vocab_size)
