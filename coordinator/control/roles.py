"""What nodes are asked to become: by an operator, or by the coordinator itself (`--roles auto`). Pure.

A change takes nothing from a node: it goes on with what it has. It counts when the node has confirmed it, and for
what it takes away from the moment that it is asked for (`Node.usable`). Nobody can take the last reader or the last
writer away, nor the last way from the one to the other.

A node that the coordinator lends does both parts until it has been calm for a while; one after the other goes home
then. A load near the limits may need a node that has just gone, and would make it go to and fro for ever; so whoever is
lent soon after one went home stays several times as long at least, up to a bound. A part that nobody does any more gets
a node sooner, before requests that wait for one are refused.
"""

from typing import Final

from coordinator.control.instructions import Send
from coordinator.control.ledger import Ledger
from coordinator.control.pressure import Pressure, PressureGauge
from coordinator.control.registry import Node, Registry
from coordinator.control.router import does, has_path
from protos import fleet_pb2
from protos.convert import shape_to_wire
from serving_core.errors import RequestError
from serving_core.reasons import DRAINING, NO_OTHER_NODE
from serving_core.shapes import BOTH, DECODE, PREFILL, Shape, check_shape, common, preset

FIXED, AUTO = "fixed", "auto"
CONFIRM_S: Final = 10.0  # for a node to confirm; then it counts as what it was
LASTS_S: Final = 3.0  # a pressure, before it counts
LACKS_S: Final = 2.0  # a part, anybody who does it: nodes whose streams broke are back by then
CALM_S: Final = 15.0  # no pressure, before a node goes home
REST_S: Final = 10.0  # of the coordinator, between a flip and the next one that lends a node
MIN_STAY_S: Final = 15.0  # between a flip and the next one that sends a node home; at first
MAX_STAY_S: Final = 600.0  # that time at most; and whoever is lent later than that after one went home, is not soon
STAY_GROWTH: Final = 4.0


class Roles:
    """Asks nodes to take other shapes."""

    def __init__(self, registry: Registry, ledger: Ledger, *, policy: str) -> None:
        """With the policy AUTO a node is lent to the part that lacks hands: it does both until they are not needed any
        more, and then what it did before. The nodes keep that, so another coordinator knows it too."""
        self._registry = registry
        self._gauge = PressureGauge(ledger, embeds=registry.embeds) if policy == AUTO else None
        self._ledger = ledger
        self._asked_s: dict[Node, float] = {}  # nodes that have not confirmed yet, and when they were asked
        self._flipped_s: float | None = None  # when the coordinator itself has asked last
        self._stay_s = MIN_STAY_S
        self._went_home_s: float | None = None  # when a node last did, unless one was lent since

    def set_shape(self, name: str, to: str | Shape, now: float) -> tuple[Node, Shape, list[Send]]:
        """An operator's word: a role or a shape; a node that was drained is given work again. The node confirms it, or
        `asked` of it is None again after CONFIRM_S. Raises RequestError, and then nothing is asked."""
        node = self._registry.named(name)
        shape = preset(to, **_limits(node)) if isinstance(to, str) else to
        check_shape(shape, **_limits(node))
        if node.is_stopping:
            raise RequestError(DRAINING, f"node {name} is stopping, and takes no role any more")
        self._check_others(node, shape)
        self._registry.drain(node, is_drained=False)
        is_so = node.shape == node.home == shape and node.asked is None
        node.home = shape
        return node, shape, [] if is_so else [self._ask(node, shape, now)]

    def tick(self, now: float) -> list[Send]:
        """What the mere passing of time asks for."""
        for node, asked_s in list(self._asked_s.items()):
            if node not in self._registry or now - asked_s >= CONFIRM_S:
                node.asked = None
            if node.asked is None:
                del self._asked_s[node]
        if self._gauge is None:
            return []
        pressure, lasted_s = self._gauge.measure(self._registry.nodes, now)
        if pressure is None or self._asked_s or not self._is_due(pressure, lasted_s, now):
            return []
        flip = self._flip(pressure)
        if flip is None:
            return []
        self._note_flip(pressure, now)
        return [self._ask(*flip, now)]

    def _ask(self, node: Node, shape: Shape, now: float) -> Send:
        node.asked = shape
        self._asked_s[node] = now
        reshape = fleet_pb2.Reshape(shape=shape_to_wire(shape), is_loan=shape != node.home)
        return Send(node, fleet_pb2.NodeCommand(reshape=reshape))

    def _check_others(self, node: Node, shape: Shape) -> None:
        """Raises RequestError unless requests can be served as far as before, also until the node has confirmed. A node
        that was drained serves none."""
        if not node.is_ready:
            return
        others = [other for other in self._registry.nodes if other is not node and other.is_ready]
        for role, does_it, did_it, part in (
            (PREFILL, shape.reads, node.usable.reads, "reads prompts"),
            (DECODE, shape.writes, node.usable.writes, "writes answers"),
        ):
            if did_it and not does_it and not any(does(other, role) for other in others):
                raise RequestError(NO_OTHER_NODE, f"node {node.name} is the last one that {part}")
        if has_path(self._registry.nodes) and not has_path(others, common(node.usable, shape)):
            message = f"without node {node.name} as it is no node would write answers to prompts that other nodes read"
            raise RequestError(NO_OTHER_NODE, message)

    # ---- the coordinator's own policy ----

    def _is_due(self, pressure: Pressure, lasted_s: float, now: float) -> bool:
        """Whether it has lasted, and the flip before was long enough ago."""
        match pressure:
            case Pressure.NONE:
                lasts_s, rests_s = CALM_S, self._stay_s
            case Pressure.NO_READER | Pressure.NO_WRITER:
                lasts_s = rests_s = LACKS_S
            case _:
                lasts_s, rests_s = LASTS_S, REST_S
        return lasted_s >= lasts_s and (self._flipped_s is None or now - self._flipped_s >= rests_s)

    def _note_flip(self, pressure: Pressure, now: float) -> None:
        self._flipped_s = now
        if pressure is Pressure.NONE:
            self._went_home_s = now
        elif self._went_home_s is not None:
            is_soon = now - self._went_home_s < MAX_STAY_S
            self._stay_s = min(STAY_GROWTH * self._stay_s, MAX_STAY_S) if is_soon else MIN_STAY_S
            self._went_home_s = None

    def _flip(self, pressure: Pressure) -> tuple[Node, Shape] | None:
        """The node that is to change for this, and what it is to become."""
        ready = [node for node in self._registry.nodes if node.is_ready]
        if pressure is Pressure.NONE:
            away = [node for node in ready if node.shape != node.home]
            return (away[0], away[0].home) if away and self._may_go_home(away[0]) else None
        is_to_read = pressure in (Pressure.READING, Pressure.NO_READER)
        lent, least = (DECODE, self._part_taken) if is_to_read else (PREFILL, self._num_to_compute)
        able = [node for node in ready if node.role == lent]
        if not able:
            return None
        node = min(able, key=least)
        return node, preset(BOTH, **_limits(node))

    def _may_go_home(self, node: Node) -> bool:
        try:
            self._check_others(node, node.home)
        except RequestError:
            return False
        return True

    def _part_taken(self, node: Node) -> float:
        return self._ledger.tokens_taken(node) / node.pool_tokens

    def _num_to_compute(self, node: Node) -> float:
        return self._ledger.of(node).tokens_to_compute


def _limits(node: Node) -> dict[str, int]:
    hello = node.hello
    return {"max_num_batched_tokens": hello.max_num_batched_tokens, "max_num_seqs": hello.max_num_seqs}
