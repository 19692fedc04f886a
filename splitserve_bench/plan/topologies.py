"""Compare by simulation how many requests of one load the ways to use two nodes' cores keep within their limits.

The ways are a prefill node and a decode node, two mixed nodes, or one mixed node with the cores of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.datasets import fit, plan, random_load
from splitserve_bench.serve.metrics import Limits, is_good, tpot_s, ttft_s, with_limits
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
    """The shares of one load's requests that each fleet kept within both limits: `others` by the fleet's name.

    `whole` is the share of one node with the cores of both.
    """

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    whole: float
    others: dict[str, float]


def compare_topologies(
    node: Profile, whole: Profile, prompt_tokens: int, output_tokens: int, requests_per_s: float
) -> Topologies:
    """Simulate NUM_REQUESTS requests of about these lengths, at Poisson arrivals of this rate, on each fleet.

    `node` is the profile of one of two nodes, `whole` that of a node with the cores of both. The limits are multiples
    of what such a request takes alone on the latter.
    """
    vocab_size = node.node.vocab_size
    limits = _limits(whole, prompt_tokens, output_tokens)
    drawn = random_load(NUM_REQUESTS, prompt_tokens, output_tokens, RANGE_RATIO, vocab_size, Random(SEED))
    shapes = fit(drawn, node.node.max_model_len).shapes
    sent = plan(shapes, send_times_s(NUM_REQUESTS, requests_per_s, 1.0, Random(f"{SEED} arrivals")))
    planned = with_limits(sent, lambda each: limits)
    return Topologies(
        prompt_tokens,
        output_tokens,
        requests_per_s,
        _kept(whole, WHOLE, planned, limits),
        {str(fleet): _kept(node, fleet, planned, limits) for fleet in FLEETS},
    )


def _limits(whole: Profile, prompt_tokens: int, output_tokens: int) -> Limits:
    alone = random_load(1, prompt_tokens, max(2, output_tokens), 0.0, whole.node.vocab_size, Random(SEED))
    found = simulate(whole, WHOLE, plan(alone, [0.0]), max_concurrency=None, request_timeout_s=TIMEOUT_S)
    outcome = found.outcomes[0]
    return Limits(TTFT_SCALE * (ttft_s(outcome) or 0.0), TPOT_SCALE * (tpot_s(outcome) or 0.0))


def _kept(profile: Profile, fleet: FleetSize, planned: Sequence[PlannedRequest], limits: Limits) -> float:
    found = simulate(profile, fleet, planned, max_concurrency=None, request_timeout_s=TIMEOUT_S)
    return sum(is_good(each, limits) for each in found.outcomes) / len(found.outcomes)
