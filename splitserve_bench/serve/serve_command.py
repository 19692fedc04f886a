"""`splitserve bench serve`: an open-loop load on a running server, and what of it was good."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from splitserve.signals import run_to_end
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.serve_options import (
    ServeCommand,
    ServeOptions,
    ignore_eos_option,
    load_options,
    obey_retry_after_option,
    result_options,
    send_limits_option,
    stages_options,
    where_options,
)

if TYPE_CHECKING:  # imported when the command runs, so that help is quick
    from splitserve_bench.serve.records import Outcome


@click.command("serve", cls=ServeCommand)
@where_options
@ignore_eos_option
@load_options
@stages_options
@obey_retry_after_option
@send_limits_option(default=False)
@result_options
def serve_command(**flags: Any) -> None:
    """Send a load to a running server: latencies, throughput, and the share of requests within their limits."""
    run_to_end(_serve(ServeOptions(**flags)))


async def _serve(options: ServeOptions) -> None:
    from splitserve_bench.serve.metrics import parse_goodput
    from splitserve_bench.serve.misses import frequent_errors, is_complete
    from splitserve_bench.serve.reporting import Reporting
    from splitserve_bench.serve.session import connect
    from splitserve_bench.serve.told import told
    from splitserve_bench.serve.workloads import workload_of

    options.check()
    options.check_pace()
    reporting = Reporting(options)
    session = await connect(options)
    if options.wants_capacity:
        options = replace(options, request_rate=await session.capacity_per_s())
    workload = workload_of(options, session.max_model_len, session.vocab_size)
    await session.warm_up(workload)
    run, limits = reporting.begin(session.model, workload, options.request_rate), parse_goodput(options.goodput)
    planned = told(workload.planned, lambda each: limits) if options.send_limits else workload.planned
    came: list[Outcome] = []
    try:
        outcomes = await session.send(planned, came.append)
    except (asyncio.CancelledError, BenchError):
        reporting.show_stopped(came, len(planned), run)
        raise
    reporting.show(outcomes, run)
    if not any(map(is_complete, outcomes)):
        [(error, _), *_] = frequent_errors(outcomes)
        raise BenchError(f"none of the {len(outcomes)} requests has a complete answer: {error}")
