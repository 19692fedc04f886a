"""Compare by simulation how many requests of one load the ways to use two nodes' cores keep within their limits.

The ways are a prefill node and a decode node, two mixed nodes, or one mixed node with the cores of both. The simulator
runs the code that serves, on the costs that `splitserve doctor` has measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Final

from splitserve_bench.doctor.costs import NodeCosts, PrefillCost
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.datasets import Shape, fit, plan, random_load
from splitserve_bench.serve.metrics import Limits, is_good, tpot_s, ttft_s, with_limits
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.fleet import FleetSize, Simulated, simulate
from splitserve_bench.simulate.profile import ControlProfile, Grid, NodeSizes, Profile, StepProfile

SPLIT, COLOCATED, ONE_NODE = "split", "colocated", "one node"
EVEN: Final = "even"
FLEETS: Final = {SPLIT: FleetSize(1, 1), COLOCATED: FleetSize(0, 0, 2), ONE_NODE: FleetSize(0, 0, 1)}
NUM_REQUESTS: Final = 100
RANGE_RATIO: Final = 0.5  # of the lengths, around their means
TTFT_SCALE: Final = 6.0  # limits, as multiples of what a request takes alone on the largest node
TPOT_SCALE: Final = 2.5
RATE_SHARE: Final = 0.8  # of the requests/s that two mixed nodes serve while always as many requests run
MARGIN: Final = 0.05  # of the requests: fleets that keep less more than another are even
TIMEOUT_S: Final = 600.0
SEED: Final = "topologies"
CONTROL: Final = ControlProfile(0.001, 0.001)  # messages, and the way through the API server
CHUNKS: Final = (1, 64, 256, 512)
CONTEXTS: Final = (0, 512, 2048)  # tokens before a chunk


@dataclass(frozen=True, slots=True)
class Topologies:
    """The share of one load's requests that each fleet keeps within both limits, by the fleet's name in FLEETS.

    ONE_NODE is missing where its costs are not known.
    """

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    kept: dict[str, float]

    @property
    def best(self) -> str:
        """Return the fleet that keeps MARGIN more than each other; EVEN without one."""
        return best_of(self.kept)


def best_of(kept: dict[str, float]) -> str:
    """Return the name whose share is MARGIN above all others; EVEN without one."""
    name, share = max(kept.items(), key=lambda each: each[1])
    return name if all(share >= other + MARGIN for at, other in kept.items() if at != name) else EVEN


def mean_kept(found: Sequence[Topologies]) -> dict[str, float]:
    """Return the mean share of the requests that each fleet keeps over these loads, of which there is one at least."""
    return {name: fmean(each.kept[name] for each in found) for name in found[0].kept}


def compare_topologies(
    node: NodeSizes, costs: NodeCosts, running: int, prompt_tokens: int, output_tokens: int
) -> Topologies:
    """Simulate NUM_REQUESTS requests of about these lengths, as a Poisson process, on each fleet.

    `node` has the sizes of each node. The limits are multiples of what such a request takes alone on the largest node.
    The rate is RATE_SHARE of what two mixed nodes serve while 2 * `running` requests always run.
    """
    profiles = dict.fromkeys((SPLIT, COLOCATED), _profile(node, costs.prefill, costs.decode, costs))
    if costs.whole is not None:
        profiles[ONE_NODE] = _profile(node, costs.whole.prefill, costs.whole.decode, costs)
    shapes = _shapes(node, NUM_REQUESTS, prompt_tokens, output_tokens, RANGE_RATIO)
    limits = _limits(profiles.get(ONE_NODE, profiles[SPLIT]), prompt_tokens, output_tokens)
    closed = plan(shapes, [0.0] * NUM_REQUESTS)
    rate = RATE_SHARE * _requests_per_s(_simulated(profiles[COLOCATED], COLOCATED, closed, 2 * running))
    sent = plan(shapes, send_times_s(NUM_REQUESTS, rate, 1.0, Random(f"{SEED} arrivals")))
    planned = with_limits(sent, lambda each: limits)
    kept = {name: _kept(_simulated(profile, name, planned), limits) for name, profile in profiles.items()}
    return Topologies(prompt_tokens, output_tokens, rate, kept)


def _shapes(node: NodeSizes, count: int, prompt_tokens: int, output_tokens: int, ratio: float) -> tuple[Shape, ...]:
    drawn = random_load(count, prompt_tokens, output_tokens, ratio, node.vocab_size, Random(SEED))
    return fit(drawn, node.max_model_len).shapes


def _limits(profile: Profile, prompt_tokens: int, output_tokens: int) -> Limits:
    alone = plan(_shapes(profile.node, 1, prompt_tokens, max(2, output_tokens), 0.0), [0.0])
    [outcome] = _simulated(profile, ONE_NODE, alone).outcomes
    return Limits(TTFT_SCALE * (ttft_s(outcome) or 0.0), TPOT_SCALE * (tpot_s(outcome) or 0.0))


def _simulated(
    profile: Profile, fleet: str, planned: Sequence[PlannedRequest], max_concurrency: int | None = None
) -> Simulated:
    return simulate(profile, FLEETS[fleet], planned, max_concurrency=max_concurrency, request_timeout_s=TIMEOUT_S)


def _requests_per_s(found: Simulated) -> float:
    return len(found.outcomes) / max(each.ended_s for each in found.outcomes)


def _kept(found: Simulated, limits: Limits) -> float:
    return fmean(is_good(each, limits) for each in found.outcomes)


def _profile(node: NodeSizes, prefill: PrefillCost, decode: Grid, costs: NodeCosts) -> Profile:
    steps = StepProfile(answers=decode, prompts=_chunks(prefill), overhead_s=0.0)
    return Profile("", 1, node, steps, costs.kv_transfer, CONTROL)


def _chunks(cost: PrefillCost) -> Grid:
    """Return the seconds of chunks: each begins anew, and its tokens attend to those before."""
    seconds = (
        (cost.base_s + cost.prefill_s(start + size) - cost.prefill_s(start) for start in CONTEXTS) for size in CHUNKS
    )
    return Grid(CHUNKS, CONTEXTS, tuple(map(tuple, seconds)))
