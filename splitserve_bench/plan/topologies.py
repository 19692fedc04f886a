"""How many requests of one load the ways to use two nodes' cores keep within their limits: a prefill node and a decode
node, two mixed nodes, or one node with the cores of both. By simulation, of a bounded number of requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.datasets import fit, plan, random_load
from splitserve_bench.serve.metrics import Limits, is_good, told, tpot_s, ttft_s
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import Profile

WHOLE: Final = FleetSize(0, 0, 1)
FLEETS: Final = (FleetSize(1, 1), FleetSize(0, 0, 2))
NUM_REQUESTS: Final = 100
RANGE_RATIO: Final = 0.5  # of the lengths, around their means
TTFT_SCALE: Final = 6.0  # limits, as multiples of what a request takes alone on the large node
TPOT_SCALE: Final = 2.5
TIMEOUT_S: Final = 600.0
SEED: Final = "topologies"


@dataclass(frozen=True, slots=True)
class Topologies:
    """Shares of the requests that were kept within both limits, by name of the fleet; `whole` of one large node."""

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    whole: float
    others: dict[str, float]


def compare_topologies(
    node: Profile, whole: Profile, prompt_tokens: int, output_tokens: int, requests_per_s: float
) -> Topologies:
    """Simulate NUM_REQUESTS requests of about these lengths, at Poisson arrivals of this rate, on each fleet.

    `node` is the profile of one of two nodes, `whole` that of a node with the cores of both.
    """
    vocab_size = node.node.vocab_size
    limits = _limits(whole, prompt_tokens, output_tokens)
    drawn = random_load(NUM_REQUESTS, prompt_tokens, output_tokens, RANGE_RATIO, vocab_size, Random(SEED))
    shapes = fit(drawn, node.node.max_model_len).shapes
    sent = plan(shapes, send_times_s(NUM_REQUESTS, requests_per_s, 1.0, Random(f"{SEED} arrivals")))
    planned = told(sent, lambda each: limits)
    return Topologies(
        prompt_tokens,
        output_tokens,
        requests_per_s,
        _kept(whole, WHOLE, planned, limits),
        {str(fleet): _kept(node, fleet, planned, limits) for fleet in FLEETS},
    )


def _limits(whole: Profile, prompt_tokens: int, output_tokens: int) -> Limits:
    alone = random_load(1, prompt_tokens, max(2, output_tokens), 0.0, whole.node.vocab_size, Random(SEED))
    outcome = simulate(whole, WHOLE, plan(alone, [0.0]), max_concurrency=None, request_timeout_s=TIMEOUT_S)[0]
    return Limits(TTFT_SCALE * (ttft_s(outcome) or 0.0), TPOT_SCALE * (tpot_s(outcome) or 0.0))


def _kept(profile: Profile, fleet: FleetSize, planned: Sequence[PlannedRequest], limits: Limits) -> float:
    outcomes = simulate(profile, fleet, planned, max_concurrency=None, request_timeout_s=TIMEOUT_S)
    return sum(is_good(each, limits) for each in outcomes) / len(outcomes)
