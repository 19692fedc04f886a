"""Work out when one prefill node and one decode node serve more, or smoother, than the same two as mixed nodes.

Pure arithmetic over what one node of a machine costs. The assumptions:

- Every request has a prompt of n tokens and an output of m tokens, and the clients keep 2 B requests running: B on each
  of two mixed ("colocated") nodes, or all 2 B on the one decode node. No prompt's beginning is cached.
- prefill_s(n) is a + b n + c n². step_s(b) is measured at some batches and contexts, straight in between and beyond;
  the requests have n + m / 2 tokens each in their cache.
- Colocated, a prompt is computed between the steps of the requests that run there and stalls each by prefill_s(n),
  however it is cut into chunks. While one output is generated, B - 1 others begin beside it:
      time between tokens = step_s(B) + (B - 1) prefill_s(n) / m
      requests per second = 2 / (prefill_s(n) + m step_s(B) / B)
- Split, the prompt is computed on the other node, and the transfer of its KV, latency + n bytes_per_token / bandwidth,
  occupies both nodes; each request waits for its own and is held up by those of the others:
      time between tokens = step_s(2 B) + 2 B transfer_s(n) / m
      requests per second = 1 / the longer of (prefill_s(n) + transfer_s(n), m step_s(2 B) / 2 B + transfer_s(n))
  So the two nodes are in balance when prefill_s(n) = m step_s(2 B) / 2 B; otherwise one of them is idle at times.
- One mixed node with the cores of both has all 2 B requests and its own prefill_s and step_s:
      time between tokens = step_s(2 B) + (2 B - 1) prefill_s(n) / m
      requests per second = 1 / (prefill_s(n) + m step_s(2 B) / 2 B)
- The split pays when it serves as many requests, to a tenth, and is ahead by a tenth in requests or time between
  tokens. How long requests wait in queues is left out.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from splitserve_bench.simulate.profile import Grid, TransferProfile

MARGIN: Final = 1.1  # what is less than a tenth apart is even
GRID: Final = 1.05  # ratio of neighbouring prompt lengths that are tried
DEGREES: Final = (0, 1, 2)

Verdict = Literal["split", "even", "colocated"]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The seconds of a prompt of n tokens: base_s + token_s n + pair_s n²."""

    base_s: float
    token_s: float
    pair_s: float

    def prefill_s(self, num_tokens: int) -> float:
        """Return the prefill time in seconds of a prompt of `num_tokens` tokens."""
        return self.base_s + self.token_s * num_tokens + self.pair_s * num_tokens**2


@dataclass(frozen=True, slots=True)
class WholeCost:
    """What one node costs that has the cores of both."""

    prefill: PrefillCost
    decode: Grid  # seconds of a step, by answers and tokens in each cache


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What two nodes of one machine cost, and one node in their place, None where that was not measured."""

    prefill: PrefillCost
    decode: Grid
    kv_transfer: TransferProfile
    token_bytes: int  # of KV
    whole: WholeCost | None = None

    def transfer_s(self, prompt_tokens: int) -> float:
        """Return the time in seconds of the KV transfer of a prompt of `prompt_tokens` tokens."""
        return self.kv_transfer.transfer_s(prompt_tokens * self.token_bytes)


class Served(NamedTuple):
    """The request rate that nodes serve of one mix of lengths, and the mean time between two tokens of an output."""

    requests_per_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Split and colocated nodes under one mix of lengths: request rates, and mean times between tokens.

    `why` says in words what decides the verdict.
    """

    prompt_tokens: int
    output_tokens: int
    colocated_requests_per_s: float
    split_requests_per_s: float
    colocated_tpot_s: float
    split_tpot_s: float
    prefill_nodes: float  # for each decode node, so that all are equally busy
    verdict: Verdict
    why: str
    whole: Served | None = None  # by one node with the cores of both

    @property
    def requests_ratio(self) -> float:
        """Return the request rate of split nodes divided by that of colocated ones: above 1 the split serves more."""
        return self.split_requests_per_s / self.colocated_requests_per_s

    @property
    def whole_ratio(self) -> float | None:
        """Return the request rate of one node on all cores divided by the better one of two nodes.

        None if one node was not measured.
        """
        most = max(self.split_requests_per_s, self.colocated_requests_per_s)
        return None if self.whole is None else self.whole.requests_per_s / most

    @property
    def pace_ratio(self) -> float:
        """Return the time between tokens of colocated nodes over that of split ones: above 1 the split is faster."""
        return self.colocated_tpot_s / self.split_tpot_s


def compare(costs: NodeCosts, running: int, prompt_tokens: int, output_tokens: int) -> Comparison:
    """Compare split with colocated nodes under requests of these lengths, `running` of them at a time for each node."""
    prefill_s, transfer_s = costs.prefill.prefill_s(prompt_tokens), costs.transfer_s(prompt_tokens)
    context_tokens = prompt_tokens + output_tokens / 2
    step_s = costs.decode.at(running, context_tokens)
    joint_step_s = costs.decode.at(2 * running, context_tokens)
    prefill_node_s = prefill_s + transfer_s
    decode_node_s = output_tokens * joint_step_s / (2 * running) + transfer_s
    colocated = 2 / (prefill_s + output_tokens * step_s / running)
    split = 1 / max(prefill_node_s, decode_node_s)
    colocated_tpot_s = step_s + (running - 1) * prefill_s / output_tokens
    split_tpot_s = joint_step_s + 2 * running * transfer_s / output_tokens
    nodes = prefill_node_s / decode_node_s
    verdict, why = _judge(split / colocated, colocated_tpot_s / split_tpot_s, prefill_node_s, decode_node_s)
    whole = None if costs.whole is None else _whole(costs.whole, 2 * running, prompt_tokens, output_tokens)
    return Comparison(
        prompt_tokens, output_tokens, colocated, split, colocated_tpot_s, split_tpot_s, nodes, verdict, why, whole
    )


def _whole(costs: WholeCost, running: int, prompt_tokens: int, output_tokens: int) -> Served:
    prefill_s = costs.prefill.prefill_s(prompt_tokens)
    step_s = costs.decode.at(running, prompt_tokens + output_tokens / 2)
    requests_per_s = 1 / (prefill_s + output_tokens * step_s / running)
    return Served(requests_per_s, step_s + (running - 1) * prefill_s / output_tokens)


def pays_between(costs: NodeCosts, running: int, output_tokens: int, most_prompt_tokens: int) -> tuple[int, int] | None:
    """Return the least and the greatest prompt length at which the split pays for such outputs, or None.

    Lengths up to `most_prompt_tokens` are tried, each a twentieth above the last. In between the split is never behind;
    of several such ranges the widest is returned. `running` requests run at a time for each node.
    """
    verdicts = [(each, compare(costs, running, each, output_tokens).verdict) for each in _lengths(most_prompt_tokens)]
    found = []
    for is_behind, run in itertools.groupby(verdicts, key=lambda verdict: verdict[1] == "colocated"):
        paying = [] if is_behind else [length for length, verdict in run if verdict == "split"]
        if paying:
            found.append((paying[0], paying[-1]))
    return max(found, key=lambda ends: ends[1] / ends[0], default=None)


def fit_prefill(points: Sequence[tuple[int, float]]) -> PrefillCost:
    """Return the prefill cost closest to these pairs of prompt tokens and seconds, by least relative squares.

    No part of it is below 0. At least one pair is needed.
    """
    lengths, seconds = np.array(points, dtype=float).T
    candidates = []
    for count in (1, 2, 3):
        for degrees in itertools.combinations(DEGREES, count):
            columns = np.stack([lengths**degree / seconds for degree in degrees], axis=1)
            found = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
            if (found >= 0).all():
                error = float(np.square(columns @ found - 1).sum())
                candidates.append((error, dict(zip(degrees, map(float, found), strict=True))))
    _, best = min(candidates, key=lambda candidate: (round(candidate[0], 12), len(candidate[1])))
    return PrefillCost(*(best.get(degree, 0.0) for degree in DEGREES))


def fit_transfers(points: Sequence[tuple[int, float]]) -> TransferProfile:
    """Return latency and bandwidth of transfers from pairs of bytes and seconds, of which at least two are needed.

    The bandwidth is that between the smallest and the largest; the latency is what the smallest takes beyond that.
    """
    (few_bytes, few_s), (many_bytes, many_s) = min(points), max(points)
    byte_s = max((many_s - few_s) / (many_bytes - few_bytes), 0.0) or many_s / many_bytes
    return TransferProfile(max(0.0, few_s - few_bytes * byte_s), 1 / byte_s)


def _lengths(most: int) -> list[int]:
    """Return the prompt lengths to try up to `most`, ascending, each about a twentieth above the last."""
    num_steps = math.ceil(math.log(most) / math.log(GRID))
    return sorted({min(most, round(GRID**step)) for step in range(num_steps + 1)})


def _judge(requests: float, pace: float, prefill_node_s: float, decode_node_s: float) -> tuple[Verdict, str]:
    """Return verdict and reason from requests_ratio, pace_ratio, and the seconds that a request takes of each node."""
    fewer = "the prefill node is the bottleneck" if prefill_node_s > decode_node_s else "the prefill node idles"
    if requests < 1 / MARGIN:
        return "colocated", fewer
    if requests >= MARGIN:
        return "split", "one large batch of sequences, more requests"
    if pace >= MARGIN:
        return "split", "no prompt stalls a sequence"
    if pace < 1 / MARGIN:
        return "colocated", "two small batches step faster"
    return "even", "within a tenth"
