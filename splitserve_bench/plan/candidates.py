"""Plans, and which of them are worth a simulation. Pure.

A plan is what one cell runs: prefill nodes, decode nodes and mixed nodes, behind one coordinator. Cells are
equal and know nothing of each other: a load that is dealt to them at random leaves each the same kind of load, at its
share of the rate. (Of Poisson arrivals exactly; of a trace as far as its shape does not depend on the rate.)

What a node does in a second is estimated from its steps: prompts in whole chunks, answers in the largest batch within
the limit on TPOT and the pool, both where their seconds and those of the steps fill up the limit. An estimate says in
which order plans are looked at, and which of very many at all. It decides nothing else.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from serving_core.shapes import DECODE, MIXED, PREFILL
from splitserve_bench.plan.loads import AskedLoad, Lengths
from splitserve_bench.plan.nodes import AskedNodes, Machines, NodeKind
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.simulate.costs import StepLoad

DEVICE, COST, POWER = "device", "cost", "power"
# What goodput is shown by: words, and times what requests a second are.
OBJECTIVES: Final = {DEVICE: ("req/s a device", 1), COST: ("requests a dollar", 3600), POWER: ("req/s a kilowatt", 1)}
RATIOS: Final = 3  # of prefill nodes to decode nodes, for each pair of kinds
HALVINGS: Final = 40
ROUNDS: Final = 20
FILL: Final = 1.5
USUAL_TPOT_S: Final = 0.05  # where no limit says how long an answer may take
LETTERS: Final = {PREFILL: "P", DECODE: "D", MIXED: "B"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags of a search."""

    nodes: AskedNodes
    load: AskedLoad
    gpus: int
    cells: int
    objective: str  # one of OBJECTIVES
    candidates: int
    goodput: tuple[str, ...]
    attainment: float
    tolerance: float
    max_probes: int
    num_prompts: int
    seconds: float
    all_plans: bool  # are searched to the end, not only the best two

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def asked_from_json(text: str) -> Asked:
    """Return what to_json has written."""
    fields = {name: _tuples(value) for name, value in json.loads(text).items()}
    nodes, load = (({name: _tuples(value) for name, value in fields.pop(part).items()}) for part in ("nodes", "load"))
    return Asked(nodes=AskedNodes(**nodes), load=AskedLoad(**load), **fields)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes that are alike, and begin in the same role."""

    role: str
    kind: NodeKind
    count: int

    @property
    def num_devices(self) -> int:
        return self.count * self.kind.num_devices


@dataclass(frozen=True, slots=True)
class Placed:
    """A node on its host."""

    name: str
    role: str
    kind: NodeKind
    host: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cell of so many devices runs. A host's devices are of one hardware, and a node's on one host."""

    pools: tuple[Pool, ...]
    cell_devices: int
    gpus_per_host: int
    names_hardware: bool = False  # where there is more than one to choose from

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def dollars_per_h(self) -> float:
        return sum(pool.count * pool.kind.dollars_per_h for pool in self.pools)

    @property
    def kilowatts(self) -> float:
        return sum(pool.count * pool.kind.watts for pool in self.pools) / 1e3

    def __str__(self) -> str:
        names = [f" {pool.kind.hardware}" if self.names_hardware else "" for pool in self.pools]
        return " + ".join(
            f"{pool.count}{LETTERS[pool.role]}{name} {pool.kind.grid}"
            for pool, name in zip(self.pools, names, strict=True)
        )

    def count_of(self, role: str) -> int:
        return sum(pool.count for pool in self.pools if pool.role == role)

    def placed(self) -> list[Placed]:
        """Every node on the first host that has room, the roles in turn, so that hosts get some of each."""
        free: list[tuple[str, int]] = []  # hardware and free devices of each host
        placed = []
        for name, pool in self._in_turn():
            kind = pool.kind
            fits = (at for at, host in enumerate(free) if host[0] == kind.hardware and host[1] >= kind.num_devices)
            host = next(fits, len(free))
            if host == len(free):
                free.append((kind.hardware, self.gpus_per_host))
            free[host] = (kind.hardware, free[host][1] - kind.num_devices)
            placed.append(Placed(name, pool.role, kind, host))
        return placed

    def _in_turn(self) -> list[tuple[str, Pool]]:
        """Wide nodes first, which fit less easily; then evenly."""
        nodes = [
            (-pool.kind.num_devices, (index + 0.5) / pool.count, f"{pool.role}-{index}", pool)
            for pool in self.pools
            for index in range(pool.count)
        ]
        return [(name, pool) for _, _, name, pool in sorted(nodes, key=lambda node: node[:3])]

    def fits(self) -> bool:
        """Return whether the cell has the hosts that this plan needs."""
        hosts = {(placed.kind.hardware, placed.host) for placed in self.placed()}
        num_kinds = len({hardware for hardware, _ in hosts})
        return len(hosts) <= -(-self.cell_devices // self.gpus_per_host) + num_kinds - 1


def weight_of(plan: Plan, objective: str) -> float:
    """What goodput is divided by. Devices that a plan leaves idle count too: they are there."""
    if objective == DEVICE:
        return plan.cell_devices
    return plan.dollars_per_h if objective == COST else plan.kilowatts


class Estimates:
    """What nodes do in a second, roughly."""

    def __init__(self, lengths: Lengths, limits: Limits) -> None:
        self._input, self._output = lengths.mean_input_tokens, lengths.mean_output_tokens
        self._tpot_s = limits.tpot_s
        self._known: dict[tuple[str, NodeKind], float] = {}

    def requests_per_s(self, role: str, kind: NodeKind) -> float:
        """Return the requests of which a node in this role does its part in a second."""
        if (role, kind) not in self._known:
            prompt_s = self._prompt_s(kind)
            self._known[role, kind] = 1 / prompt_s if role == PREFILL else self._rate(kind, prompt_s * (role == MIXED))
        return self._known[role, kind]

    def of(self, pools: Iterable[Pool]) -> float:
        """Return the requests a second of all; at least those of one that comes when the one before has ended."""
        pools = tuple(pools)
        of_role: dict[str, float] = {PREFILL: 0.0, DECODE: 0.0, MIXED: 0.0}
        for pool in pools:
            of_role[pool.role] += pool.count * self.requests_per_s(pool.role, pool.kind)
        lone_s = max(self._prompt_s(pool.kind) + self._output * _answers_s(pool.kind, 1, self._input) for pool in pools)
        return max(1 / lone_s, min(of_role[PREFILL], of_role[DECODE]) + of_role[MIXED])

    def fill_s(self, pools: Sequence[Pool], rate: float) -> float:
        """Return how long it takes at this rate until as many requests decode as will: longer than a mean output, as
        the long ones are what piles up."""
        decoding = [pool for pool in pools if pool.role != PREFILL]
        of_each = rate / sum(pool.count for pool in decoding)
        is_alone = all(pool.role == MIXED for pool in pools)
        return FILL * max(self._output_s(pool, of_each, is_alone) for pool in decoding)

    def _output_s(self, pool: Pool, rate: float, is_alone: bool) -> float:
        """At its limit, unless the node reaches a lower pace. is_alone: it computes all its prompts itself."""
        kind, limit_s = pool.kind, self._tpot_s or USUAL_TPOT_S
        free = 1 - rate * self._prompt_s(kind) if is_alone else 1.0
        tpot_s, context = 0.0, self._input + self._output / 2
        for _ in range(ROUNDS if free > 0 else 0):
            num_sequences = min(kind.sizes.max_sequences, max(1.0, rate * self._output * tpot_s))
            tpot_s = _answers_s(kind, num_sequences, context) / free
        return self._output * min(limit_s, tpot_s or limit_s)

    def _prompt_s(self, kind: NodeKind) -> float:
        chunk = kind.sizes.max_num_batched_tokens
        load = StepLoad(num_prompt_tokens=chunk, num_before=chunk * self._input / 2)
        return kind.costs.step_s(load) * self._input / chunk

    def _rate(self, kind: NodeKind, prompt_s: float) -> float:
        """Return the highest rate at which steps, with what prompts take between them, are within the limit."""
        context = self._input + self._output / 2
        most = min(kind.sizes.max_sequences, kind.sizes.num_blocks * kind.sizes.block_size / context)
        if self._tpot_s is None:
            return 1 / (prompt_s + self._output * _answers_s(kind, most, context) / most)
        low, high = 0.0, most / (self._output * self._tpot_s)
        for _ in range(HALVINGS):
            rate = (low + high) / 2
            step_s = _answers_s(kind, max(1.0, rate * self._output * self._tpot_s), context)
            if step_s <= self._tpot_s * (1 - rate * prompt_s):
                low = rate
            else:
                high = rate
        return low


def _answers_s(kind: NodeKind, num_sequences: float, context_tokens: float) -> float:
    return kind.costs.step_s(StepLoad(num_sequences, num_sequences * context_tokens))


def candidates(asked: Asked, machines: Machines, estimates: Estimates, longest_tokens: int) -> list[Plan]:
    """The plans that promise most, the best colocated one among them; best first. Only kinds whose pool can hold the
    longest request."""
    kinds = [each for each in machines.kinds if each.sizes.num_blocks * each.sizes.block_size >= longest_tokens]
    devices = asked.gpus // asked.cells
    of_prefill, of_decode, of_both = (
        [kind for kind in kinds if kind.hardware in names or not names]
        for names in (asked.nodes.prefill_hardware, asked.nodes.decode_hardware, asked.nodes.both_hardware)
    )
    colocated = [(Pool(MIXED, kind, devices // kind.num_devices),) for kind in of_both if kind.num_devices <= devices]
    promising = [*colocated, *_splits(of_prefill, of_decode, of_both, devices, estimates)]

    def promise(pools: tuple[Pool, ...]) -> float:
        return estimates.of(pools) / (
            weight_of(Plan(pools, devices, asked.nodes.gpus_per_host), asked.objective) or 1.0
        )

    ranked = sorted(dict.fromkeys(promising), key=promise, reverse=True)
    names_hardware = len({kind.hardware for kind in machines.kinds}) > 1
    plans = [Plan(pools, devices, asked.nodes.gpus_per_host, names_hardware) for pools in ranked]
    plans = [plan for plan in plans if plan.fits()]
    chosen = plans[: asked.candidates]
    if best := next((plan for plan in plans if plan.count_of(MIXED) and len(plan.pools) == 1), None):
        chosen = chosen if best in chosen else [*chosen[:-1], best]
    return chosen


def _splits(
    of_prefill: Sequence[NodeKind],
    of_decode: Sequence[NodeKind],
    of_both: Sequence[NodeKind],
    devices: int,
    estimates: Estimates,
) -> Iterator[tuple[Pool, ...]]:
    """For each pair of kinds the numbers of nodes that promise most; and the best with one mixed node
    instead."""
    for prefill in of_prefill:
        for decode in of_decode:
            pairs = [
                (Pool(PREFILL, prefill, count), Pool(DECODE, decode, left // decode.num_devices))
                for count in range(1, devices // prefill.num_devices + 1)
                if (left := devices - count * prefill.num_devices) >= decode.num_devices
            ]
            ranked = sorted(pairs, key=estimates.of, reverse=True)[:RATIOS]
            yield from ranked
            for pools in ranked[:1]:
                yield from _with_one_of_both(pools, of_both)


def _with_one_of_both(pools: tuple[Pool, Pool], of_both: Sequence[NodeKind]) -> Iterator[tuple[Pool, ...]]:
    """In the place of a node of either kind, where another one of it is left."""
    for at, pool in enumerate(pools):
        if pool.count > 1 and pool.kind in of_both:
            fewer = Pool(pool.role, pool.kind, pool.count - 1)
            yield (*pools[:at], fewer, *pools[at + 1 :], Pool(MIXED, pool.kind, 1))
