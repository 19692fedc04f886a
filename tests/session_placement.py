"""Placement of sessions, simulated: `python -m tests.session_placement [--prefill 2 --decode 4 --sessions 300 ...]`.

Nodes are H100s by their data sheet with a Llama of 8B parameters, joined by 400 Gbit/s, with KV blocks of 64 tokens.
A session has 4 to 8 turns: a system prompt of 1,024 tokens that all share, 2,000 to 6,000 tokens, then a lognormal
number (median 400) in each turn, outputs of 50 to 150 tokens, and think times of 5 s in the mean. Good are sessions
all of whose turns have TTFT ≤ 500 ms and TPOT ≤ 40 ms. `always` prefills every turn on a prefill node, as `auto` did
before decode nodes appended.
"""

import argparse
import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import click

from splitserve_bench.plan.nodes import NodeOptions, machines_of
from splitserve_bench.serve.command import ServeOptions, serve_command
from splitserve_bench.serve.metrics import parse_goodput, summarize, with_limits
from splitserve_bench.serve.session_figures import session_figures
from splitserve_bench.serve.workload import workload_of
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import Profile

BLOCK_FACTOR = 4  # blocks of 64 tokens instead of 16: simulations take less time
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
FLAGS = {
    "dataset_name": "sessions",
    "random_input_len": 4000,
    "random_output_len": 100,
    "random_range_ratio": 0.5,
    "random_prefix_len": 1024,
    "num_turns": "4-8",
    "turn_input_len": "lognormal:400:1",
    "think_time_s": "exp:5",
    "goodput": ("ttft:500", "tpot:40"),
    "send_limits": True,
}


def profile_of(link: str) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        options = NodeOptions(folder, (), (), (), ("h100",), link, link, 8, (1,), 0, 32768, 0, 0)
        profile = machines_of(options).kinds[0].profile
    node = profile.node
    node = replace(
        node,
        num_blocks=node.num_blocks // BLOCK_FACTOR,
        block_size=node.block_size * BLOCK_FACTOR,
        block_bytes=node.block_bytes * BLOCK_FACTOR,
    )
    return replace(profile, model="Llama-8B", node=node)


def row(profile: Profile, size: FleetSize, num_sessions: int, rate: float) -> str:
    usual = serve_command.make_context("serve", []).params
    flags = {**usual, **FLAGS, "num_prompts": num_sessions, "request_rate": rate}
    options = ServeOptions(**{each.name: flags[each.name] for each in fields(ServeOptions)})
    workload = workload_of(options, profile.node.max_model_len, profile.node.vocab_size)
    limits = parse_goodput(options.goodput)
    planned = with_limits(workload.planned, lambda each: limits)
    found = simulate(profile, size, planned, max_concurrency=None, request_timeout_s=600.0)
    figures = session_figures(summarize(found.outcomes, limits))
    assert figures is not None
    later, first = figures.later, figures.turns[0]
    values = [
        f"{figures.num_good} of {figures.num}",
        f"{figures.goodput_per_s:.2f}",
        *(f"{1e3 * (each.ttft_s.percentile(50) or 0):.0f}" for each in (first, later)),
        f"{1e3 * (later.ttft_s.percentile(95) or 0):.0f}",
        f"{1e3 * (later.tpot_s.percentile(99) or 0):.1f}",
        f"{100 * (later.cached_share or 0):.0f} %",
        f"{100 * (later.same_node_share or 0):.0f} %",
    ]
    return " | ".join((f"| {size.policy}", *values)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("prefill", 2), ("decode", 4), ("sessions", 300), ("rate", 8.0)):
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    parser.add_argument("--link", default="ib")
    parser.add_argument("--policies", default="auto,always,round-robin,least-loaded")
    asked = parser.parse_args()
    profile = profile_of(asked.link)
    click.echo("| policy | good | good/s | TTFT p50 ms, first | later | p95, later | TPOT p99 | cached | same node |")
    click.echo("|---|---|---|---|---|---|---|---|---|")
    for policy in asked.policies.split(","):
        size = FleetSize(asked.prefill, asked.decode, policy=policy)
        click.echo(row(profile, size, asked.sessions, asked.rate))


if __name__ == "__main__":
    main()
