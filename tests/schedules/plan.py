"""What one seed stands for: a fleet, what its clients ask, and what befalls it when. Nothing but data."""

from dataclasses import dataclass
from random import Random
from typing import Any

from coordinator.control.placement.costs import FETCH_ALWAYS, FETCH_AUTO
from coordinator.control.roles import AUTO, FIXED
from coordinator.control.slo import Slo
from coordinator.settings import CoordinatorSettings
from serving_core.shapes import Shape
from tests.schedules.model import VOCAB_SIZE
from tests.schedules.node import BLOCK_SIZE, Sizes

FLEETS = (
    ("prefill", "decode"), ("mixed",), ("mixed", "mixed"), ("prefill", "mixed"), ("decode", "mixed"),
    ("prefill", "decode", "decode"), ("prefill", "prefill", "decode"), ("prefill", "decode", "mixed"),
    ("prefill", "prefill", "decode", "decode"), ("mixed", "mixed", "mixed"), ("prefill", "decode", "mixed", "mixed"),
)  # fmt: skip
ROLES = ("prefill", "decode", "mixed")
PATIENCE_S = 300.0  # of most clients: longer than anything may take, so that a deadline hides nothing
FAULTS = {
    "kill": 3, "reset": 3, "block": 2, "pause": 2, "pause_coordinator": 1, "restart_coordinator": 1,
    "noise": 6, "reset_data": 2, "block_data": 2, "migration": 8, "begin_again": 3, "drain": 3, "reshape": 2,
    "leave": 4, "abort": 1, "fail_step": 1, "stall_step": 1, "break_off": 6, "spoil": 4,
}  # fmt: skip
"""By how often they come."""
ASKS_S, FAULTS_S = 1.5, 1.5  # in which requests come, and faults begin


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    at_s: float
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str
    timeout_s: float
    slo: Slo
    resumes: bool  # goes on when its call breaks off


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that befalls the fleet: a method of World by name."""

    at_s: float
    name: str
    arguments: tuple[Any, ...]
    seconds: float = 0.0  # how long it lasts

    def __str__(self):
        return f"{self.name}({', '.join(map(str, self.arguments))}) for {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Plan:
    """One schedule."""

    roles: dict[str, str]  # of the nodes by name
    sizes: Sizes
    settings: CoordinatorSettings
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def calm_s(self):
        """When the last fault is over."""
        return max((each.at_s + each.seconds for each in self.faults), default=0.0)


def plan_of(seed, kinds=FAULTS):
    """The schedule of a seed, with faults of these kinds. One in twenty has none."""
    random = Random(f"{seed} plan")
    roles = {f"{role}-{index}": role for index, role in enumerate(random.choice(FLEETS))}
    num_blocks = random.choice([8, 12, 30, 60])
    asks = _asks(random, num_blocks * BLOCK_SIZE)
    if random.random() < 0.3:  # no more than the largest request needs
        num_blocks = max(-(-(len(ask.prompt) + ask.max_tokens) // BLOCK_SIZE) for ask in asks)
    num_state_blocks = Random(f"{seed} state").choice([0, 0, 1, 2])
    sizes = Sizes(
        num_blocks=num_blocks + num_state_blocks,
        max_num_batched_tokens=random.randint(6, 40),
        max_num_seqs=random.randint(1, 6),
        overlap_min_tokens=random.choice([2, 16]),
        is_batch_invariant=random.random() < 0.5,
        num_state_blocks=num_state_blocks,
    )
    settings = CoordinatorSettings(
        max_restarts=random.choice([0, 2, 20, 20]),
        keep_after_s=random.choice([0.1, 2.0]),
        node_wait_s=random.choice([0.0, 5.0, 5.0]),
        roles=random.choice([FIXED, FIXED, AUTO]),
        step_timeout_s=20.0,
        remote_prefix_fetch=Random(f"{seed} lending").choice([FETCH_ALWAYS, FETCH_ALWAYS, FETCH_AUTO]),
    )
    num_faults = 0 if not kinds or random.random() < 0.05 else random.randint(1, 9)
    faults = [_fault(random, kinds, sorted(roles), asks) for _ in range(num_faults)]
    return Plan(roles, sizes, settings, asks, tuple(sorted(faults, key=lambda each: each.at_s)))


def _asks(random, room):
    """Of any size that fits; many begin alike."""
    common = [random.randrange(VOCAB_SIZE) for _ in range(room)]
    span_s, most_output = random.choice([0.05, ASKS_S]), random.choice([4, 60, 120])
    asks = []
    for index in range(random.randint(3, 8)):
        num_common = random.randint(0, min(16, room - 10)) if random.random() < 0.6 else 0
        prompt = [*common[:num_common], *(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 9)))]
        asks.append(
            Ask(
                at_s=random.random() * span_s,
                name=f"r{index}",
                prompt=tuple(prompt),
                max_tokens=random.randint(1, min(room - len(prompt), most_output)),
                salt=random.choice(["", "", "b"]),
                timeout_s=random.uniform(0.05, 2.0) if random.random() < 0.06 else PATIENCE_S,
                slo=_slo(random),
                resumes=random.random() < 0.7,
            )
        )
    return tuple(asks)


def _slo(random):
    if random.random() < 0.7:
        return Slo()
    ttft_s, tpot_s = random.choice([None, 0.05, 1.0]), random.choice([None, 0.005, 0.05])
    return Slo("", ttft_s, tpot_s, random.choice([-1, 0, 1]))


def _fault(random, kinds, nodes, asks):
    name = random.choices(list(kinds), weights=kinds.values())[0]
    node, other, ask = random.choice(nodes), random.choice(nodes), random.choice(asks)
    short_s, long_s = random.uniform(0.01, 1.0), random.choice([random.uniform(0.1, 2.0), random.uniform(2.0, 6.0)])
    arguments = {
        "kill": (node,),
        "pause": (node,),
        "block": (node, random.choice(["up", "down", "both"])),
        "reset": (node,),
        "spoil": (node, random.choice(["up", "down"]), random.choice(["lost", "doubled", "overtaken"])),
        "block_data": (node, other, random.choice(["up", "both"])),
        "reset_data": (node, other),
        "noise": tuple(random.choice([0.0, 0.1, 0.5]) for _ in range(4)),
        "leave": (ask.name,),
        "break_off": (ask.name,),
        "abort": (ask.name,),
        "reshape": (node, random.choice([*ROLES, Shape(random.randint(1, 6), 1, True)])),
        "drain": (node,),
        "fail_step": (node,),
        "stall_step": (node,),
    }
    lasts_s = dict.fromkeys(("pause", "pause_coordinator", "block", "block_data", "stall_step"), long_s)
    lasts_s |= {"kill": short_s, "restart_coordinator": short_s, "noise": 2 * short_s}
    lasts_s |= {"break_off": random.choice([0.0, short_s])}
    lasts_s |= {"migration": 2 * short_s, "begin_again": short_s / 2, "drain": 2 * short_s}
    first_s = ask.at_s if name in ("leave", "abort", "break_off") else 0.0  # what is asked later cannot be given up
    return Fault(first_s + random.random() * FAULTS_S, name, arguments.get(name, ()), lasts_s.get(name, 0.0))
