"""The flags of `splitserve bench dominance` that say what the grid is."""

from pathlib import Path
from typing import Final

import click

from splitserve_bench.options import options_of
from splitserve_bench.serve.serve_options import ABOVE_0, AZURE, LENGTH, MOONCAKE

LIMITS: Final = ("6x:2.5x", "6x:1.5x")

trace_options = options_of(
    click.option("--dataset-name", default=AZURE, show_default=True, type=click.Choice((AZURE, MOONCAKE))),
    click.option(
        "--trace", "traces", multiple=True, required=True, metavar="NAME=FILE", help="Give it again for more."
    ),
    click.option(
        "--length-scale",
        "length_scales",
        multiple=True,
        metavar="[NAME=]TIMES",
        help="Times the lengths of all traces, or of one.  [default: 1]",
    ),
    click.option(
        "--rates", multiple=True, required=True, metavar="[NAME=]R,R,...", help="Requests a second, of all or of one."
    ),
    click.option(
        "--limits",
        default=LIMITS,
        show_default=True,
        multiple=True,
        metavar="TTFT:TPOT",
        help="In ms, or with an x as multiples of what the median request takes alone; give it again for more.",
    ),
    click.option("--seeds", default=20, show_default=True, type=LENGTH, help="Stretches of each trace."),
    click.option("--num-prompts", default=300, show_default=True, type=LENGTH, help="Requests of a stretch."),
    click.option(
        "--request-timeout-s", default=600.0, show_default=True, type=ABOVE_0, help="A later answer is a miss."
    ),
)
contender_options = options_of(
    click.option("--contender", help="Fleet that is to be the best one.  [default: 2B-timely]"),
    click.option(
        "--other",
        "others",
        multiple=True,
        help="Fleet that it is held against; give it again for more.  [default: colocated, split and the other "
        "policies, on two nodes]",
    ),
    click.option(
        "--beside",
        multiple=True,
        help="Fleet that is shown, not counted; give it again for more.  [default: 2B and 1P+1B-timely]",
    ),
    click.option(
        "--whole-profile",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Of one node on the cores of all, which is shown beside them.",
    ),
)
