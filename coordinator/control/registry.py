"""Which nodes there are, and how they do. Pure: no I/O, no clock."""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.control.node_health import LossCause, NodeHealth
from coordinator.control.pauses import Pauses
from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION, shape_from_wire, shape_to_wire
from serving_core.adapter_names import ADAPTER_NAME, MOST_ADAPTERS, adapters_in
from serving_core.costs import StepWeights
from serving_core.errors import RequestError
from serving_core.prefix import MAX_MAKERS
from serving_core.reasons import BAD_PARAM, NAME_TAKEN, NODE_NOT_FOUND, PAIRING_MISMATCH, QUEUE_FULL
from serving_core.shapes import BOTH, ROLES, Shape, check_shape, common, role_of

READY: Final = "ready"  # states of a node
DRAINING: Final = "draining"
DRAINED: Final = "drained"  # it drains, and has no part in any request: as clients see it
MAX_NAME_CHARS: Final = 80  # of a name that nobody has
MAX_NODES: Final = 1024
MAX_NAMES: Final = 2 * MAX_NODES  # that health is kept of, after their nodes have gone
# Of --node-timeout-s: by how much this process may be late before it leaves the time out, and what is a pause of it.
MAX_LAG: Final = 1 / 8
PAUSE: Final = 1 / 2
MAX_TP_SIZE: Final = 64
KV_KEY_BYTES: Final = 32
MAX_FIRST_SESSION: Final = 2**63  # what is left of 64 bits no coordinator can use up
VERSION_KEY: Final = "protocol_version"  # in the fingerprint of NodeInfo
_NAME: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True, eq=False)
class Node:
    """One attachment of one node process, as it describes itself; a node that attaches again is a new Node."""

    hello: fleet_pb2.Hello
    session: int
    health: NodeHealth
    load: inference_pb2.NodeLoad
    shape: Shape  # that the node has confirmed
    home: Shape  # that it has unless the coordinator lends it: what an operator has made of it, or what it has begun as
    asked: Shape | None = None  # of the node, which has not confirmed it yet
    step_weights: StepWeights = field(default_factory=StepWeights)  # as far as they are known
    decode_margin: float = 1.0  # what the mean of steps without prompts rarely exceeds, by the expected one
    step_age_s: float = 0.0
    has_told: bool = False  # what its load is
    is_stopping: bool = False  # as the node says of itself
    is_drained: bool = False  # by an operator
    num_tokens_written: int = 0  # that it has told of in steps
    # Of the full blocks that the node says to hold, `serving_core.prefix.hint_of` their names; at most num_blocks
    # and num_tier_blocks together.
    hints: set[int] = field(default_factory=set)
    # Who may have made those blocks, in the order in which the node looks for them.
    makers: list[bytes] = field(default_factory=list)
    # What the hello says for good, read once: placement asks every node for every request.
    name: str = field(init=False)
    tp_size: int = field(init=False)  # ranks of each of its stages; one that does not say has 1
    pp_size: int = field(init=False)  # its stages; one that does not say has 1
    block_size: int = field(init=False)
    pool_tokens: int = field(init=False)  # that the node's KV pool holds
    reach_tokens: int = field(init=False)  # of the pool, and of others that may hold annexes of its requests
    max_request_tokens: int = field(init=False)  # of the longest request that the node can serve

    def __post_init__(self) -> None:
        hello = self.hello
        self.name, self.block_size = hello.node.name, hello.block_size
        self.tp_size, self.pp_size = max(1, hello.tp_size), max(1, hello.pp_size)
        self.pool_tokens = hello.num_blocks * hello.block_size
        self.set_reach(self.pool_tokens)

    def set_reach(self, num_tokens: int) -> None:
        self.reach_tokens = num_tokens
        self.max_request_tokens = min(num_tokens, self.hello.max_model_len)

    @property
    def role(self) -> str:
        """What the node's shape amounts to."""
        return role_of(self.shape)

    @property
    def kind(self) -> str:
        """What the node is called in a sentence."""
        return "node" if self.role == BOTH else f"{self.role} node"

    @property
    def usable(self) -> Shape:
        """What the node may be given. A shape that it was asked to take counts at once where it takes work away, and
        where it brings some only once it is confirmed."""
        return common(self.shape, self.asked) if self.asked else self.shape

    @property
    def root_fingerprint(self) -> dict[str, str]:
        """What names of blocks are rooted in: the node's fingerprint without the version, which the wire alone adds."""
        return {key: value for key, value in self.hello.node.fingerprint.items() if key != VERSION_KEY}

    @property
    def traits(self) -> Mapping[str, str]:
        """What the bits of the node's answers depend on beside the fingerprint; empty where it does not tell."""
        return self.hello.node.traits

    @property
    def shares_blocks(self) -> bool:
        """Whether requests share blocks of its pool: one that has told of no block yet may keep none."""
        return bool(self.hints)

    @property
    def is_ready(self) -> bool:
        return self.load.state == READY


class Registry:
    """Attached nodes by name. A node is lost when its stream ends, or when it is silent or stuck in a step.

    `facts` is what the coordinator knows itself of every node's fingerprint, beside the protocol version.
    `first_session` is to be random: nodes may still show sessions of a coordinator that ran before this one.
    `model_names` are what clients call the model, and no adapter may be called. `embeds`: whether the model makes
    embeddings, and writes no answers.
    """

    def __init__(
        self,
        facts: Mapping[str, str],
        *,
        node_timeout_s: float,
        step_timeout_s: float,
        first_session: int = 1,
        model_names: Collection[str] = (),
        embeds: bool = False,
    ) -> None:
        self.embeds: Final = embeds
        self._facts = {VERSION_KEY: PROTOCOL_VERSION, **facts}
        self._model_names = model_names
        # LoRA adapters of the fleet, also while it has no node; None before the first one has come.
        self.adapters: Sequence[str] | None = None
        self._node_timeout_s = node_timeout_s
        self._step_timeout_s = step_timeout_s
        self._nodes: dict[str, Node] = {}
        self._by_name: list[Node] = []
        self._sessions = itertools.count(first_session)
        self._health: dict[str, NodeHealth] = {}  # by name, the one that attached last at the end
        self.pauses = Pauses(MAX_LAG * node_timeout_s, PAUSE * node_timeout_s)

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.name) is node

    @property
    def nodes(self) -> Sequence[Node]:
        """All attached nodes by name; another sequence when one comes or goes."""
        return self._by_name

    def find(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def named(self, name: str) -> Node:
        """The attached node of this name. Raises RequestError where there is none."""
        if name not in self._nodes:
            raise RequestError(NODE_NOT_FOUND, f"no node {name[:MAX_NAME_CHARS]!r} is attached")
        return self._nodes[name]

    def admit(self, hello: fleet_pb2.Hello, now: float) -> Node:
        """Takes a node in, under a session of its own. A process whose stream broke unnoticed shows the session of the
        node that it was, and replaces that one.

        Raises RequestError, and then nothing changes: NAME_TAKEN while another process is attached under the name, any
        other reason when the node cannot belong to this fleet.
        """
        _check_hello(hello)
        others = [node for node in self.nodes if node.name != hello.node.name]
        if len(others) >= MAX_NODES:
            raise RequestError(QUEUE_FULL, f"the fleet has {MAX_NODES} nodes, its limit")
        self._check_fingerprint(hello.node, others)
        adapters = self._checked_adapters(hello.node)
        self._check_name(hello)
        shape, home = _checked(hello.shape, hello), _checked(hello.home, hello)
        load = inference_pb2.NodeLoad(state=READY, num_blocks=hello.num_blocks, num_blocks_free=hello.num_blocks)
        session, name = next(self._sessions), hello.node.name
        health = self._health_of(name)
        health.attached(session, hello, self.pauses.awake_s(now))
        node = self._nodes[name] = Node(hello, session, health, load, shape, home)
        self.adapters = adapters
        self._sort()
        _complete(node, now)
        return node

    def heartbeat(self, node: Node, heartbeat: fleet_pb2.Heartbeat, now: float) -> None:
        before = node.is_ready, node.shape
        self.pauses.note(now)
        node.health.heard(self.pauses.awake_s(now))
        node.step_age_s = heartbeat.step_age_s
        node.load, node.has_told = heartbeat.load, True
        node.step_weights = _weights(heartbeat.load)
        told = heartbeat.load.decode_margin
        node.decode_margin = told if 1 <= told < math.inf else 1.0
        node.is_stopping = heartbeat.load.state != READY
        if heartbeat.load.HasField("shape"):
            node.shape = shape_from_wire(heartbeat.load.shape)
        if node.shape == node.asked:
            node.asked = None
        _complete(node, now)
        if (node.is_ready, node.shape) != before:
            self._reckon_reaches()

    def drain(self, node: Node, *, is_drained: bool = True) -> None:
        """The node is to be given nothing more, as long as it is attached; or is given work again, unless it stops."""
        node.is_drained = is_drained
        _set_state(node)
        self._reckon_reaches()

    def cache_changed(self, node: Node, event: fleet_pb2.CacheChanged) -> int:
        """Notes which blocks the node holds: first those removed, then those stored.

        Returns how many of the stored ones were left out because the node would hold more than it has room for. Such a
        node has miscounted, but hints are advice: a wrong one costs a detour and never a wrong token, whereas losing
        the node would cost its requests.
        """
        node.makers, hints = list(event.makers[:MAX_MAKERS]), node.hints
        hints.difference_update(event.removed)
        new = [hint for hint in dict.fromkeys(event.stored) if hint not in hints]
        room = node.hello.num_blocks + node.hello.num_tier_blocks - len(hints)
        hints.update(new[:room])
        return len(new[room:])

    def lose(self, node: Node) -> None:
        """Forgets a node; one that is not attached any more is left alone."""
        if node in self:
            del self._nodes[node.name]
            self._sort()

    def expired(self, now: float) -> list[tuple[Node, LossCause, str]]:
        """Nodes that must count as lost, with the cause, also in words. Call it many times per node_timeout_s: the time
        in which this process does not run counts for no silence."""
        self.pauses.note(now)
        return [(node, *why) for node in self.nodes if (why := self._why_expired(node, now))]

    def _health_of(self, name: str) -> NodeHealth:
        """What is known of the node of this name, which attaches now. Forgets those that have been gone for longest,
        where there are too many."""
        health = self._health.pop(name) if name in self._health else NodeHealth(self._node_timeout_s)
        num_too_many = max(0, len(self._health) + 1 - MAX_NAMES)
        for gone in [each for each in self._health if each not in self._nodes][:num_too_many]:
            del self._health[gone]
        self._health[name] = health
        return health

    def _sort(self) -> None:
        self._by_name = [self._nodes[name] for name in sorted(self._nodes)]
        self._reckon_reaches()

    def _reckon_reaches(self) -> None:
        for node in self.nodes:
            node.set_reach(node.pool_tokens + sum(host.hello.annexes.num_tokens for host in self.hosts_of(node)))

    def hosts_of(self, node: Node) -> list[Node]:
        """Those that may hold blocks of its requests, the one with most room first. Only a node that both reads and
        writes has some, and only such as compute to the same bits."""
        if not node.hello.HasField("annexes") or not (node.shape.reads and node.shape.writes):
            return []

        def is_host(other: Node) -> bool:
            is_alike = other.traits == node.traits and other.block_size == node.block_size
            return other is not node and other.is_ready and is_alike and other.hello.HasField("annexes")

        return sorted(filter(is_host, self.nodes), key=lambda host: (-host.load.num_blocks_free, host.name))

    def _check_name(self, hello: fleet_pb2.Hello) -> None:
        name = hello.node.name
        holder = self.find(name)
        if holder is not None and hello.session != holder.session:
            raise RequestError(NAME_TAKEN, f"another process is attached as {name}")

    def _check_fingerprint(self, info: inference_pb2.NodeInfo, others: list[Node]) -> None:
        given = dict(info.fingerprint)
        known = {key: value for key, value in given.items() if key in self._facts}
        _compare(f"node {info.name} and the coordinator", known, self._facts)
        if others:  # the fleet agrees with itself, so one stands for all
            other = others[0].hello.node
            _compare(f"nodes {info.name} and {other.name}", given, dict(other.fingerprint))

    def _checked_adapters(self, info: inference_pb2.NodeInfo) -> list[str]:
        """Those of a node. Raises RequestError for such as clients could not ask for."""
        adapters = adapters_in(info.fingerprint)
        if len(adapters) > MOST_ADAPTERS:
            message = f"node {info.name} has {len(adapters)} adapters, the limit is {MOST_ADAPTERS}"
            raise RequestError(BAD_PARAM, message)
        for name in adapters:
            if name in self._model_names or not ADAPTER_NAME.fullmatch(name):
                why = "is the model's own" if name in self._model_names else f"must match {ADAPTER_NAME.pattern}"
                raise RequestError(BAD_PARAM, f"the name of adapter {name!r:.80} of node {info.name} {why}")
        return adapters

    def _why_expired(self, node: Node, now: float) -> tuple[LossCause, str] | None:
        if (why := node.health.why_silent(self.pauses.awake_s(now))) is not None:
            return LossCause.SILENCE, why
        if node.step_age_s > self._step_timeout_s:
            return LossCause.STEP, f"one step has taken {node.step_age_s:.1f} s (limit {self._step_timeout_s:g} s)"
        return None


def _complete(node: Node, now: float) -> None:
    """Puts what is known of the node into its load, whether it has told it itself or not."""
    load, health = node.load, node.health
    load.name, load.role = node.name, node.role
    load.shape.CopyFrom(shape_to_wire(node.shape))
    load.num_losses, load.longest_heartbeat_gap_s = health.num_losses(now), health.longest_gap_s
    _set_state(node)


def _set_state(node: Node) -> None:
    node.load.state = DRAINING if node.is_drained or node.is_stopping else READY


def _weights(load: inference_pb2.NodeLoad) -> StepWeights:
    """What the node has learnt of its steps; before it has, what it tells in other figures."""
    told = load.step_weights
    if len(told) == len(StepWeights._fields) and all(0 <= each < math.inf for each in told):
        return StepWeights(*told)
    rate = load.prefill_tokens_per_s
    return StepWeights(step_s=load.lone_step_s, token_s=1 / rate if rate > 0 else 0.0)


def _checked(wire: inference_pb2.Shape, hello: fleet_pb2.Hello) -> Shape:
    """A shape that a node says to have. Raises RequestError for one that it could not take."""
    shape = shape_from_wire(wire)
    try:
        check_shape(shape, max_num_batched_tokens=hello.max_num_batched_tokens, max_num_seqs=hello.max_num_seqs)
    except RequestError as error:
        raise RequestError(error.reason, f"node {hello.node.name}: {error}") from error
    return shape


def _check_hello(hello: fleet_pb2.Hello) -> None:
    info = hello.node
    if not _NAME.fullmatch(info.name):
        raise RequestError(BAD_PARAM, f"a node's name must match {_NAME.pattern}, not {info.name!r:.80}")
    if info.role not in ROLES:
        raise RequestError(BAD_PARAM, f"a node's role must be one of {', '.join(ROLES)}, not {info.role!r:.80}")
    for name in ("num_blocks", "block_size", "max_model_len"):
        if getattr(hello, name) == 0:
            raise RequestError(BAD_PARAM, f"{name} of node {info.name} must be above 0")
    if hello.tp_size > MAX_TP_SIZE:
        raise RequestError(BAD_PARAM, f"tp_size of node {info.name} is {hello.tp_size}, the limit is {MAX_TP_SIZE}")
    if (num_ranks := max(1, hello.tp_size) * hello.pp_size) > MAX_TP_SIZE:
        raise RequestError(BAD_PARAM, f"node {info.name} has {num_ranks} ranks, the limit is {MAX_TP_SIZE}")
    annexes = hello.annexes
    if len(annexes.host.key) not in (0, KV_KEY_BYTES) or len(annexes.host.address) > MAX_NAME_CHARS:
        raise RequestError(
            BAD_PARAM, f"what node {info.name} says of annexes is no address and a key of {KV_KEY_BYTES} bytes"
        )
    if annexes.num_tokens > hello.num_blocks * hello.block_size:
        raise RequestError(
            BAD_PARAM, f"node {info.name} would hold {annexes.num_tokens} tokens for others, over its pool"
        )
    if len(hello.kv_keys) > MAX_TP_SIZE or any(len(key) != KV_KEY_BYTES for key in hello.kv_keys):
        raise RequestError(BAD_PARAM, f"node {info.name} must have {MAX_TP_SIZE} keys of {KV_KEY_BYTES} bytes at most")


def _compare(names: str, given: Mapping[str, str], expected: Mapping[str, str]) -> None:
    differences = [
        f"{key} is {given.get(key, 'missing'):.80} and {expected.get(key, 'missing'):.80}"
        for key in sorted(given.keys() | expected.keys())
        if given.get(key) != expected.get(key)
    ]
    if differences:
        raise RequestError(PAIRING_MISMATCH, f"{names} differ: {'; '.join(differences)}")
