"""`splitserve bench serve`: an open-loop load on a running server, and what of it was good."""

import asyncio
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from splitserve.commands.terminal import report
from splitserve.signals import run_to_end
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.serve_options import (
    ServeCommand,
    ServeOptions,
    load_options,
    result_options,
    send_limits_option,
    where_options,
)

if TYPE_CHECKING:  # imported when the command runs, so that help is quick
    from splitserve_bench.serve.records import Outcome


@click.command("serve", cls=ServeCommand)
@where_options
@load_options
@send_limits_option(default=False)
@result_options
def serve_command(**flags: Any) -> None:
    """Send a load to a running server: latencies, throughput, and the share of requests within their limits."""
    run_to_end(_serve(ServeOptions(**flags)))


async def _serve(options: ServeOptions) -> None:
    from splitserve_bench.serve.load import describe, run_load
    from splitserve_bench.serve.metrics import parse_goodput
    from splitserve_bench.serve.progress import shown_progress
    from splitserve_bench.serve.reporting import Reporting
    from splitserve_bench.serve.told import told
    from splitserve_bench.serve.workloads import vocab_size_of, warm_up_of, workload_of

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
    run, limits = reporting.begin(served.model, workload.num_clipped), parse_goodput(options.goodput)
    planned = told(workload.planned, lambda each: limits) if options.send_limits else workload.planned
    came: list[Outcome] = []
    try:
        with shown_progress(served.model) as on_progress:
            outcomes = await send(planned, on_progress=on_progress, on_outcome=came.append)
    except (asyncio.CancelledError, BenchError):
        reporting.show_stopped(came, len(planned), run)
        raise
    reporting.show(outcomes, run)
