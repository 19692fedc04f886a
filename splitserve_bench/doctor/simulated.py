"""Simulate how many requests of one load each way to use a machine keeps, by what `splitserve doctor` has measured."""

from typing import Final

from splitserve_bench.doctor.split_model import Comparison, NodeCosts, PrefillCost
from splitserve_bench.plan.topologies import Topologies, compare_topologies
from splitserve_bench.simulate.profile import ControlProfile, Grid, NodeSizes, Profile, StepProfile

CONTROL: Final = ControlProfile(0.001, 0.001)  # messages, and the way through the API server
CHUNKS: Final = (1, 64, 256, 512)
CONTEXTS: Final = (0, 512, 2048)  # tokens before a chunk
RATE_SHARE: Final = 0.8  # of the requests/s that the better way to have two nodes serves


def simulated_topologies(model: str, node: NodeSizes, costs: NodeCosts, usual: Comparison) -> Topologies | None:
    """Return which share of requests of the lengths of `usual` each fleet keeps within their limits.

    None without the costs of a node with all cores. `node` has the sizes of one of two nodes; the large one gets the
    same.
    """
    if costs.whole is None:
        return None
    one = _profile(model, node, costs.prefill, costs.decode, costs)
    whole = _profile(model, node, costs.whole.prefill, costs.whole.decode, costs)
    rate = RATE_SHARE * max(usual.split_requests_per_s, usual.colocated_requests_per_s)
    return compare_topologies(one, whole, usual.prompt_tokens, usual.output_tokens, rate)


def _profile(model: str, node: NodeSizes, prefill: PrefillCost, decode: Grid, costs: NodeCosts) -> Profile:
    steps = StepProfile(answers=decode, prompts=_chunks(prefill), overhead_s=0.0)
    return Profile(model, 1, node, steps, costs.kv_transfer, CONTROL)


def _chunks(cost: PrefillCost) -> Grid:
    """Return the seconds of chunks: each begins anew, and its tokens attend to those before."""
    seconds = (
        (cost.base_s + cost.prefill_s(start + size) - cost.prefill_s(start) for start in CONTEXTS) for size in CHUNKS
    )
    return Grid(CHUNKS, CONTEXTS, tuple(map(tuple, seconds)))
