"""List plans, and choose those that are worth a simulation. Pure.

A plan is what one cell runs: prefill nodes, decode nodes and mixed nodes, behind one coordinator. Cells are equal and
independent: a load that is divided among them at random gives each the same kind of load, at its share of the rate. (Of
Poisson arrivals exactly; of a trace as far as its shape does not depend on the rate.)

What a node does in a second is estimated from its steps: prompts in whole chunks, outputs in the largest batch within
the limit on TPOT and the KV pool, both where their seconds and those of the steps fill up the limit. An estimate
decides in which order plans are simulated, and which ones when there are very many. It decides nothing else.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from serving_core.shapes import DECODE, MIXED, PREFILL
from splitserve_bench.plan.loads import Lengths, LoadOptions
from splitserve_bench.plan.nodes import Machines, NodeKind, NodeOptions
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
class PlanOptions:
    """All flags of a search."""

    nodes: NodeOptions
    load: LoadOptions
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
        """Return the flags as a JSON text."""
        return json.dumps(dataclasses.asdict(self))


def options_from_json(text: str) -> PlanOptions:
    """Return the flags that a text of `PlanOptions.to_json` has."""
    fields = {name: _tuples(value) for name, value in json.loads(text).items()}
    nodes, load = (({name: _tuples(value) for name, value in fields.pop(part).items()}) for part in ("nodes", "load"))
    return PlanOptions(nodes=NodeOptions(**nodes), load=LoadOptions(**load), **fields)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Pool:
    """A number of equal nodes that start in the same role (prefill, decode or mixed)."""

    role: str
    kind: NodeKind
    count: int

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all these nodes."""
        return self.count * self.kind.num_devices


@dataclass(frozen=True, slots=True)
class Placed:
    """A node of a plan, and the number of the host that it is on."""

    name: str
    role: str
    kind: NodeKind
    host: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes that one cell runs on `cell_devices` devices.

    All devices of a host are of one hardware, and all of a node on one host.
    """

    pools: tuple[Pool, ...]
    cell_devices: int
    gpus_per_host: int
    names_hardware: bool = False  # where there is more than one to choose from

    @property
    def num_devices(self) -> int:
        """Return the number of devices that the nodes use."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def dollars_per_h(self) -> float:
        """Return the price of the used devices, in dollars an hour."""
        return sum(pool.count * pool.kind.dollars_per_h for pool in self.pools)

    @property
    def kilowatts(self) -> float:
        """Return the power of the used devices, in kilowatts."""
        return sum(pool.count * pool.kind.watts for pool in self.pools) / 1e3

    def __str__(self) -> str:
        names = [f" {pool.kind.hardware}" if self.names_hardware else "" for pool in self.pools]
        return " + ".join(
            f"{pool.count}{LETTERS[pool.role]}{name} {pool.kind.grid}"
            for pool, name in zip(self.pools, names, strict=True)
        )

    def count_of(self, role: str) -> int:
        """Return the number of nodes that start in this role."""
        return sum(pool.count for pool in self.pools if pool.role == role)

    def placed(self) -> list[Placed]:
        """Return every node with its host: the first one that has room for it.

        Roles take turns, so that hosts get some of each.
        """
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
        """Return name and pool of each node in the order of placing: nodes of many devices first, then evenly."""
        nodes = [
            (-pool.kind.num_devices, (index + 0.5) / pool.count, f"{pool.role}-{index}", pool)
            for pool in self.pools
            for index in range(pool.count)
        ]
        return [(name, pool) for _, _, name, pool in sorted(nodes, key=lambda node: node[:3])]

    def fits(self) -> bool:
        """Return whether the cell has as many hosts as the plan needs."""
        hosts = {(placed.kind.hardware, placed.host) for placed in self.placed()}
        num_kinds = len({hardware for hardware, _ in hosts})
        return len(hosts) <= -(-self.cell_devices // self.gpus_per_host) + num_kinds - 1


def weight_of(plan: Plan, objective: str) -> float:
    """Return what the objective divides goodput by: a cell's devices (idle ones too), dollars an hour, or kilowatts."""
    if objective == DEVICE:
        return plan.cell_devices
    return plan.dollars_per_h if objective == COST else plan.kilowatts


class Estimates:
    """Estimate roughly how many requests nodes serve in a second, for requests of these lengths with these limits."""

    def __init__(self, lengths: Lengths, limits: Limits) -> None:
        self._input, self._output = lengths.mean_input_tokens, lengths.mean_output_tokens
        self._tpot_s = limits.tpot_s
        self._known: dict[tuple[str, NodeKind], float] = {}

    def requests_per_s(self, role: str, kind: NodeKind) -> float:
        """Return the number of requests of which a node in this role does its part in a second."""
        if (role, kind) not in self._known:
            prompt_s = self._prompt_s(kind)
            self._known[role, kind] = 1 / prompt_s if role == PREFILL else self._rate(kind, prompt_s * (role == MIXED))
        return self._known[role, kind]

    def of(self, pools: Iterable[Pool]) -> float:
        """Return the number of requests that these nodes serve in a second.

        It is at least the rate of requests that are sent one after the other.
        """
        pools = tuple(pools)
        of_role: dict[str, float] = {PREFILL: 0.0, DECODE: 0.0, MIXED: 0.0}
        for pool in pools:
            of_role[pool.role] += pool.count * self.requests_per_s(pool.role, pool.kind)
        lone_s = max(self._prompt_s(pool.kind) + self._output * _answers_s(pool.kind, 1, self._input) for pool in pools)
        return max(1 / lone_s, min(of_role[PREFILL], of_role[DECODE]) + of_role[MIXED])

    def fill_s(self, pools: Sequence[Pool], rate: float) -> float:
        """Return the seconds after which, at this rate, as many requests decode at a time as ever will.

        That is longer than a mean output takes, as the long ones accumulate.
        """
        decoding = [pool for pool in pools if pool.role != PREFILL]
        of_each = rate / sum(pool.count for pool in decoding)
        is_alone = all(pool.role == MIXED for pool in pools)
        return FILL * max(self._output_s(pool, of_each, is_alone) for pool in decoding)

    def _output_s(self, pool: Pool, rate: float, is_alone: bool) -> float:
        """Return the seconds of an output: at the limit on TPOT, unless the node is faster at this rate.

        `is_alone`: the node also computes the prompts of its requests.
        """
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
        """Return the highest rate within the limit on TPOT when each request also takes `prompt_s` of prefill."""
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


def candidates(options: PlanOptions, machines: Machines, estimates: Estimates, longest_tokens: int) -> list[Plan]:
    """Return the plans with the highest estimates, best first, among them the best one of mixed nodes alone.

    Only kinds of node count whose KV pool holds `longest_tokens`, the longest request. At most as many plans are
    returned as the flags say.
    """
    kinds = [each for each in machines.kinds if each.sizes.num_blocks * each.sizes.block_size >= longest_tokens]
    devices = options.gpus // options.cells
    of_prefill, of_decode, of_both = (
        [kind for kind in kinds if kind.hardware in names or not names]
        for names in (options.nodes.prefill_hardware, options.nodes.decode_hardware, options.nodes.both_hardware)
    )
    colocated = [(Pool(MIXED, kind, devices // kind.num_devices),) for kind in of_both if kind.num_devices <= devices]
    promising = [*colocated, *_splits(of_prefill, of_decode, of_both, devices, estimates)]

    def promise(pools: tuple[Pool, ...]) -> float:
        return estimates.of(pools) / (
            weight_of(Plan(pools, devices, options.nodes.gpus_per_host), options.objective) or 1.0
        )

    ranked = sorted(dict.fromkeys(promising), key=promise, reverse=True)
    names_hardware = len({kind.hardware for kind in machines.kinds}) > 1
    plans = [Plan(pools, devices, options.nodes.gpus_per_host, names_hardware) for pools in ranked]
    plans = [plan for plan in plans if plan.fits()]
    chosen = plans[: options.candidates]
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
    """Yield for each pair of kinds the best numbers of prefill and decode nodes, and the best with a mixed node."""
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
    """Yield the pools with a mixed node in the place of a node of either pool that has more than one."""
    for at, pool in enumerate(pools):
        if pool.count > 1 and pool.kind in of_both:
            fewer = Pool(pool.role, pool.kind, pool.count - 1)
            yield (*pools[:at], fewer, *pools[at + 1 :], Pool(MIXED, pool.kind, 1))
