"""`splitserve bench serve`: an open-loop load on a running server, and what of it was good."""

import asyncio
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from splitserve.bench.errors import BenchError
from splitserve.bench.serve.serve_options import ServeCommand, ServeOptions, load_options, result_options, where_options
from splitserve.signals import run_to_end
from splitserve.terminal import report

if TYPE_CHECKING:  # imported when the command runs, so that help is quick
    from splitserve.bench.serve.records import Outcome


@click.command("serve", cls=ServeCommand)
@where_options
@load_options
@result_options
def serve_command(**flags: Any) -> None:
    """Send a load to a running server: latencies, throughput, and the share of requests within their limits."""
    run_to_end(_serve(ServeOptions(**flags)))


async def _serve(options: ServeOptions) -> None:
    from splitserve.bench.serve.load import describe, run_load
    from splitserve.bench.serve.progress import shown_progress
    from splitserve.bench.serve.reporting import Reporting
    from splitserve.bench.serve.workloads import vocab_size_of, warm_up_of, workload_of

    options.check()
    reporting, target = Reporting(options), options.where()
    served = await describe(target)
    target = replace(target, model=served.model)
    vocab_size = vocab_size_of(options, served, report)
    workload = workload_of(options, served.max_model_len, vocab_size)
    send = functools.partial(
        run_load, target, max_concurrency=options.max_concurrency, request_timeout_s=options.request_timeout_s
    )
    if warm_up := warm_up_of(workload, options.num_warmups, vocab_size, options.seed):
        with shown_progress("warm-up") as on_progress:
            warmed = await send(warm_up, on_progress=on_progress)
        if num_failed := sum(bool(outcome.error) for outcome in warmed):
            report(f"{num_failed} of {len(warm_up)} requests of the warm-up failed")
    run = reporting.begin(served.model, workload.num_clipped)
    told: list[Outcome] = []
    try:
        with shown_progress(served.model) as on_progress:
            outcomes = await send(workload.planned, on_progress=on_progress, on_outcome=told.append)
    except (asyncio.CancelledError, BenchError):
        reporting.show_stopped(told, len(workload.planned), run)
        raise
    reporting.show(outcomes, run)
