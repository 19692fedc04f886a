"""Keep the nodes of the fleet: what each can do, its health, its state, and which of them may serve a request. Pure.

The health of a node is kept under its name, across reconnects: a node that was lost because its heartbeats were slow
gets a longer deadline when it returns, and a node that comes and goes is reported as flapping. While the coordinator
itself was suspended, missing heartbeats say nothing about nodes.

A request needs a prefill node and a decode node, which may be the same. A node's role says which of the two it may be.
"""

import itertools
import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION, shape_from_wire, shape_to_wire
from protos.fleet_pb2 import Hello
from serving_core.errors import RequestError
from serving_core.model_files.adapter_names import ADAPTER_NAME, MOST_ADAPTERS, adapter_key, adapters_in
from serving_core.net.failure_detector import AwakeClock, FailureDetector
from serving_core.node.costs import StepWeights
from serving_core.node.prefix import MAX_NUMERICS_IDS
from serving_core.reasons import (
    BAD_PARAM,
    NAME_TAKEN,
    NO_DECODE_WORKER,
    NO_PREFILL_WORKER,
    NODE_NOT_FOUND,
    PAIRING_MISMATCH,
    QUEUE_FULL,
)
from serving_core.shapes import DECODE, MIXED, PREFILL, ROLES, Shape, check_shape, common, role_of
from serving_core.version import MAX_SKEW, VERSION, is_within_skew

RECOVERY_S: Final = 5.0  # after a pause, in which nodes have ended their streams and attach again


class Pauses:
    """Detect pauses of this process: a gap of more than `pause_s` between two calls of `note`.

    While the process runs as it should, `note` must be called at least every `max_lag_s`.
    """

    def __init__(self, max_lag_s: float, pause_s: float) -> None:
        self._clock = AwakeClock(max_lag_s)
        self._pause_s = pause_s
        self._over_s = -math.inf  # when the last pause ended

    def note(self, now: float) -> None:
        """Record that the process runs at `now`."""
        if self._clock.note(now) > self._pause_s:
            self._over_s = now

    def awake_s(self, now: float) -> float:
        """Return the time, in seconds, of a clock that stands still during pauses.

        Deadlines for other processes use it.
        """
        return self._clock.read(now)

    def is_recent(self, now: float) -> bool:
        """Return whether a pause has ended less than RECOVERY_S before `now`, so that a failure may come from it."""
        return now - self._over_s < RECOVERY_S


STARVED: Final = 0.25  # share of the time before the node attached again in which it had no CPU core
FLAP_WINDOW_S: Final = 600.0
MIN_FLAPS: Final = 3  # losses within the window with which a node counts as flapping


class LossCause(StrEnum):
    """Why the coordinator has lost a node that did not stop in good order."""

    CONNECTION = "connection"  # the stream ended: the process or its connection died
    SILENCE = "silence"  # heartbeats stay away: the process or the network is stuck
    STEP = "step"  # a step does not end
    MESSAGE = "message"  # a message of the stream was lost
    COMMANDS = "commands"  # the node does not read its commands


class NodeHealth:
    """Keep the losses and heartbeat gaps of the node of one name, across its sessions."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._session = 0
        self._detector = FailureDetector(timeout_s, 0.0)
        self._losses_s: deque[float] = deque(maxlen=100)

    def attached(self, session: int, hello: Hello, awake_s: float) -> None:
        """Record that the node has attached under a new session at `awake_s`, a time of `Pauses.awake_s`.

        A process that shows the session before in its `hello` keeps its record of gaps. If it was silent because it had
        no CPU core, its deadline grows, since that may happen again.
        """
        if hello.session and hello.session == self._session:
            self._detector.heard(awake_s, learns=hello.starved_share >= STARVED)
        else:
            self._detector = FailureDetector(self._timeout_s, awake_s)
        self._session = session

    def heard(self, awake_s: float) -> None:
        """Record that a heartbeat has come at `awake_s`, a time of `Pauses.awake_s`."""
        self._detector.heard(awake_s)

    def lost(self, now: float) -> None:
        self._losses_s.append(now)

    def why_silent(self, awake_s: float) -> str | None:
        """Return, in words, why a silent node counts as lost at `awake_s`; None while it does not.

        Times are those of `Pauses.awake_s`, a clock that stands still while the coordinator itself is paused.
        """
        return self._detector.why_suspected(awake_s)

    @property
    def longest_gap_s(self) -> float:
        """Return the longest recent gap between two heartbeats."""
        return self._detector.longest_gap_s

    def num_losses(self, now: float) -> int:
        """Return how often the node was lost within the last FLAP_WINDOW_S.

        With MIN_FLAPS losses or more it is flapping.
        """
        return sum(now - lost_s < FLAP_WINDOW_S for lost_s in self._losses_s)


READY: Final = "ready"  # states of a node
DRAINING: Final = "draining"
DRAINED: Final = "drained"  # the node drains and has no part in any request; shown to clients only
MAX_NAME_CHARS: Final = 80  # of an unknown name, in an error
MAX_NODES: Final = 1024
MAX_NAMES: Final = 2 * MAX_NODES  # names that health records are kept of
# Shares of --node-timeout-s: the lag of this process from which its time is left out, and the gap that is a pause.
MAX_LAG: Final = 1 / 8
PAUSE: Final = 1 / 2
MAX_TP_SIZE: Final = 64
KV_KEY_BYTES: Final = 32
MAX_FIRST_SESSION: Final = 2**63  # leaves more sessions of 64 bits than a coordinator can use
VERSION_KEY: Final = "protocol_version"  # key in the fingerprint of NodeInfo
_NAME: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True, eq=False)
class Node:
    """One attachment of one node process, as it describes itself; a node that attaches again is a new Node."""

    hello: fleet_pb2.Hello
    session: int
    health: NodeHealth
    load: inference_pb2.NodeLoad
    shape: Shape  # confirmed by the node
    home: Shape  # set by an operator, or the one that the node started with; role changes by load return to it
    requested_shape: Shape | None = field(default=None, init=False)  # not confirmed yet
    step_weights: StepWeights = field(default_factory=StepWeights)  # costs of a step, as far as they are known
    decode_margin: float = 1.0  # mean decode steps rarely exceed the predicted one by this factor
    step_age_s: float = 0.0
    has_reported: bool = False  # whether a heartbeat has come
    is_stopping: bool = False  # reported by the node
    is_drained: bool = False  # by an operator's order
    num_generated_tokens: int = 0  # output tokens reported in steps
    num_prefills: int = 0  # prompts that it has been given, and sequences to decode
    num_decodes: int = 0
    # Shortened block hashes (`serving_core.node.prefix.hint_of`) of the full blocks that the node reports to hold,
    # at most num_blocks + num_tier_blocks.
    hints: set[int] = field(default_factory=set)
    # Numerics ids that these blocks may have, in the order in which the node looks for them.
    numerics_ids: list[bytes] = field(default_factory=list)
    adapter_orders: dict[str, str] = field(default_factory=dict)  # folders of orders without a reply, by adapter
    adapter_retry_s: dict[str, float] = field(default_factory=dict)  # when an order that failed is repeated
    lacks_adapters: bool = False  # served adapters are still to be loaded
    is_ready: bool = field(default=True, init=False)  # whether the node takes new work
    # Kept as attributes, because placement looks at every node for every request.
    usable: Shape = field(init=False)  # the shape by which the node may be given work
    prefills: bool = field(init=False)  # whether `usable` has prefill
    decodes: bool = field(init=False)
    chunk_tokens: int = field(init=False)  # most prompt tokens of a step, also of prompts that only `decodes` brings
    name: str = field(init=False)
    tp_size: int = field(init=False)  # ranks of each pipeline stage; 1 if not reported
    pp_size: int = field(init=False)  # pipeline stages; 1 if not reported
    block_size: int = field(init=False)
    pool_tokens: int = field(init=False)  # capacity of the node's KV pool
    reach_tokens: int = field(init=False)  # capacity of the pool and of the KV holders of its requests
    has_kv_holders: bool = field(init=False)  # whether other nodes would hold KV of its requests (distributed KV)
    max_request_tokens: int = field(init=False)  # tokens of the longest request that the node can serve

    def __post_init__(self) -> None:
        hello = self.hello
        self.name, self.block_size = hello.node.name, hello.block_size
        self.tp_size, self.pp_size = max(1, hello.tp_size), max(1, hello.pp_size)
        self.pool_tokens = hello.num_blocks * hello.block_size
        self.set_reach(self.pool_tokens)
        self.set_shape(self.shape, None)

    def set_shape(self, shape: Shape, requested: Shape | None) -> None:
        """Store the shape that the node has confirmed, and the one that is requested of it (None for none).

        A requested shape that takes work away counts at once; a requested shape that adds work counts once it is
        confirmed.
        """
        self.shape, self.requested_shape = shape, requested if requested != shape else None
        self.usable = common(shape, self.requested_shape) if self.requested_shape else shape
        self.prefills, self.decodes = self.usable.prefills, self.usable.decodes
        self.chunk_tokens = self.usable.prompt_tokens or self.hello.max_num_batched_tokens

    def set_reach(self, num_tokens: int) -> None:
        self.reach_tokens, self.has_kv_holders = num_tokens, num_tokens > self.pool_tokens
        self.max_request_tokens = min(num_tokens, self.hello.max_model_len)

    @property
    def role(self) -> str:
        """Return the node's role by its confirmed shape: prefill, decode or mixed."""
        return role_of(self.shape)

    @property
    def kind(self) -> str:
        """Return the noun for the node in messages, such as "prefill node"."""
        return "node" if self.role == MIXED else f"{self.role} node"

    @property
    def root_fingerprint(self) -> dict[str, str]:
        """Return the part of the node's fingerprint that block hashes depend on: all but the protocol version."""
        return {key: value for key, value in self.hello.node.fingerprint.items() if key != VERSION_KEY}

    @property
    def numerics(self) -> Mapping[str, str]:
        """Return the properties, besides the fingerprint, that the bits of the node's outputs depend on.

        Empty if the node has not reported them.
        """
        return self.hello.node.numerics

    @property
    def shares_blocks(self) -> bool:
        """Return whether requests share blocks of the node's pool: it has reported its cache, empty or not."""
        return bool(self.numerics_ids)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The longest request and the largest pools of the fleet, in tokens; None where it has no such node.

    A pool is that of the largest prefill node, or decode node, together with its KV holders. A decode node with KV
    holders counts as a prefill node too: it prefills what is longer than the pools of others.
    """

    max_model_len: int | None
    prefill_pool_tokens: int | None
    decode_pool_tokens: int | None
    adapters: tuple[str, ...] | None  # None: no node has attached yet
    own_pool_tokens: int | None = None  # largest pool of a decode node, without KV holders


@dataclass(slots=True)
class AdapterChange:
    """What an operator has ordered of one LoRA adapter while nodes served."""

    folder: str  # to load it from; empty: unload it
    digest: str = ""  # of the loaded content, once a node has reported it
    is_served: bool = False  # whether requests may name the adapter


class Registry:
    """Keep the attached nodes by name. A node is lost when its stream ends, or when it is silent or stuck in a step.

    `facts` are the entries of every node's fingerprint that the coordinator knows itself, beside the protocol version.
    `first_session` must be random: nodes may still show sessions of a coordinator that ran before this one.
    `model_names` are the names that clients use for the model; no adapter may have one of them. `embeds`: the model
    makes embeddings and generates no tokens.
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
        # LoRA adapters of the fleet, also while it has no node; None before the first node has attached.
        self.adapters: Sequence[str] | None = None
        self.adapter_changes: dict[str, AdapterChange] = {}  # by name (coordinator/control/adapters.py)
        self._node_timeout_s = node_timeout_s
        self._step_timeout_s = step_timeout_s
        self._nodes: dict[str, Node] = {}
        self._by_name: list[Node] = []
        self._sessions = itertools.count(first_session)
        self._health: dict[str, NodeHealth] = {}  # by name, in the order of the last attachment
        self.pauses = Pauses(MAX_LAG * node_timeout_s, PAUSE * node_timeout_s)
        self.capacity = self._capacity()

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.name) is node

    @property
    def nodes(self) -> Sequence[Node]:
        """Return all attached nodes, sorted by name.

        The sequence is replaced, not changed, when a node comes or goes.
        """
        return self._by_name

    def find(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def named(self, name: str) -> Node:
        """Return the attached node of this name. Raises RequestError with reason NODE_NOT_FOUND if there is none."""
        if name not in self._nodes:
            raise RequestError(NODE_NOT_FOUND, f"no node {name[:MAX_NAME_CHARS]!r} is attached")
        return self._nodes[name]

    def admit(self, hello: fleet_pb2.Hello, now: float) -> Node:
        """Attach the node of a `hello` under a new session, and return it.

        A process that shows the session of the attached node of the same name replaces that node. Raises RequestError,
        in which case nothing changes: NAME_TAKEN while another process is attached under the name, any other reason
        when the node cannot belong to this fleet.
        """
        _check_hello(hello)
        others = [node for node in self.nodes if node.name != hello.node.name]
        if len(others) >= MAX_NODES:
            raise RequestError(QUEUE_FULL, f"the fleet has {MAX_NODES} nodes, its limit")
        changes = self._with_changes_of(hello)
        check_version(f"node {hello.node.name}", hello.node.version)
        self._check_fingerprint(hello.node, others, changes)
        self._check_adapters(hello.node)
        self._check_name(hello)
        shape, home = _checked(hello.shape, hello), _checked(hello.home, hello)
        load = inference_pb2.NodeLoad(state=READY, num_blocks=hello.num_blocks, num_blocks_free=hello.num_blocks)
        session, name = next(self._sessions), hello.node.name
        health = self._health_of(name)
        health.attached(session, hello, self.pauses.awake_s(now))
        node = self._nodes[name] = Node(hello, session, health, load, shape, home)
        self.adapter_changes = changes
        self._sort()
        self.serve_adapters()
        _complete(node, now)
        return node

    def heartbeat(self, node: Node, heartbeat: fleet_pb2.Heartbeat, now: float) -> None:
        """Record that the node lives, and store the load, the step costs, the state and the shape that it reports."""
        before = node.is_ready, node.shape
        self.pauses.note(now)
        node.health.heard(self.pauses.awake_s(now))
        node.step_age_s = heartbeat.step_age_s
        node.load, node.has_reported = heartbeat.load, True
        node.step_weights = _weights(heartbeat.load)
        margin = heartbeat.load.decode_margin
        node.decode_margin = margin if 1 <= margin < math.inf else 1.0
        node.is_stopping = heartbeat.load.state != READY
        if heartbeat.load.HasField("shape"):
            node.set_shape(shape_from_wire(heartbeat.load.shape), node.requested_shape)
        _complete(node, now)
        if (node.is_ready, node.shape) != before:
            self._changed()

    def request_shape(self, node: Node, shape: Shape | None) -> None:
        """Store the shape that is requested of a node (None for none). Sends nothing."""
        node.set_shape(node.shape, shape)
        self._changed()

    def drain(self, node: Node, *, is_drained: bool = True) -> None:
        """Stop giving work to a node that stays attached.

        With `is_drained` False, the node gets work again unless it stops.
        """
        node.is_drained = is_drained
        _set_state(node)
        self._changed()

    def cache_changed(self, node: Node, event: fleet_pb2.CacheChanged) -> int:
        """Update the blocks that the node reports to hold: first those removed, then those stored.

        Return how many stored blocks were left out because they exceed the node's capacity. Such a node has miscounted,
        but it is not lost for that: a wrong block hash costs a detour and never a wrong token.
        """
        node.numerics_ids, hints = list(event.numerics_ids[:MAX_NUMERICS_IDS]), node.hints
        hints.difference_update(event.removed)
        new = [hint for hint in dict.fromkeys(event.stored) if hint not in hints]
        room = node.hello.num_blocks + node.hello.num_tier_blocks - len(hints)
        hints.update(new[:room])
        return len(new[room:])

    def lose(self, node: Node) -> None:
        """Forget a node; a node that is not attached any more is ignored."""
        if node in self:
            del self._nodes[node.name]
            self._sort()

    def expired(self, now: float) -> list[tuple[Node, LossCause, str]]:
        """Return the nodes that count as lost, each with the cause and a sentence for the log. Removes none of them.

        Call it many times per node_timeout_s: time in which this process does not run is not counted as silence.
        """
        self.pauses.note(now)
        return [(node, *why) for node in self.nodes if (why := self._why_expired(node, now))]

    def _health_of(self, name: str) -> NodeHealth:
        """Return the health record of the node of this name, which attaches now.

        At most MAX_NAMES records are kept; those of nodes that have been gone longest are dropped.
        """
        health = self._health.pop(name) if name in self._health else NodeHealth(self._node_timeout_s)
        num_too_many = max(0, len(self._health) + 1 - MAX_NAMES)
        for gone in [each for each in self._health if each not in self._nodes][:num_too_many]:
            del self._health[gone]
        self._health[name] = health
        return health

    def _sort(self) -> None:
        self._by_name = [self._nodes[name] for name in sorted(self._nodes)]
        self._changed()

    def _changed(self) -> None:
        """Compute what follows from the set of nodes, their states and their shapes."""
        for node in self.nodes:
            node.set_reach(
                node.pool_tokens + sum(holder.hello.remote_kvs.num_tokens for holder in self.kv_holders_of(node))
            )
        self.capacity = self._capacity()

    def _capacity(self) -> Capacity:
        prefill = [node for node in self.nodes if node.prefills]
        decode = [node for node in self.nodes if node.decodes and not self.embeds]
        prefilling = [*prefill, *(node for node in decode if node.has_kv_holders)] if prefill else []
        lengths = [max(node.hello.max_model_len for node in nodes) for nodes in (prefill, decode) if nodes]
        return Capacity(
            max_model_len=min(lengths, default=None),
            prefill_pool_tokens=max((node.reach_tokens for node in prefilling), default=None),
            decode_pool_tokens=max((node.reach_tokens for node in decode), default=None),
            own_pool_tokens=max((node.pool_tokens for node in decode), default=None),
            adapters=None if self.adapters is None else tuple(self.adapters),
        )

    def kv_holders_of(self, node: Node) -> list[Node]:
        """Return the nodes that may hold KV of this node's requests (distributed KV), most free blocks first.

        Only a node that decodes has KV holders, since KV in other pools does not travel to another node, and only nodes
        whose outputs are bit-identical to its own are KV holders.
        """
        if not node.hello.HasField("remote_kvs") or not node.shape.decodes:
            return []

        def is_holder(other: Node) -> bool:
            is_alike = other.numerics == node.numerics and other.block_size == node.block_size
            return other is not node and other.is_ready and is_alike and other.hello.HasField("remote_kvs")

        return sorted(filter(is_holder, self.nodes), key=lambda host: (-host.load.num_blocks_free, host.name))

    def _check_name(self, hello: fleet_pb2.Hello) -> None:
        name = hello.node.name
        holder = self.find(name)
        if holder is not None and hello.session != holder.session:
            raise RequestError(NAME_TAKEN, f"another process is attached as {name}")

    # ---- LoRA adapters ----

    def is_model_name(self, name: str) -> bool:
        """Return whether clients use this name for the model itself."""
        return name in self._model_names

    def note_adapter(self, node: Node, name: str, digest: str) -> None:
        """Store that a node has loaded an adapter, or with an empty digest, that it has unloaded it."""
        fingerprint = node.hello.node.fingerprint
        if digest:
            fingerprint[adapter_key(name)] = digest
        else:
            fingerprint.pop(adapter_key(name), None)
        self.serve_adapters()

    def serve_adapters(self) -> None:
        """Let requests name the adapters that every node has: those of --lora, and what operators have changed."""
        own = adapters_in({key for node in self.nodes for key in node.hello.node.fingerprint})
        given = [name for name in (own if self.nodes else self.adapters or ()) if name not in self.adapter_changes]
        served = [name for name, change in self.adapter_changes.items() if change.is_served]
        self.adapters = sorted({*given, *served})
        for node in self.nodes:
            node.lacks_adapters = any(adapter_key(name) not in node.hello.node.fingerprint for name in served)
            _set_state(node)
        self._changed()

    def _with_changes_of(self, hello: fleet_pb2.Hello) -> dict[str, AdapterChange]:
        """Return the changes, with those that an earlier coordinator has made at this node. Raise RequestError for an
        adapter with other content than the fleet's."""
        changes, fingerprint = dict(self.adapter_changes), hello.node.fingerprint
        for name, folder in hello.adapter_folders.items():
            if folder and adapter_key(name) in fingerprint:
                changes.setdefault(name, AdapterChange(folder, fingerprint[adapter_key(name)], is_served=True))
        for name, change in changes.items():
            digest = fingerprint.get(adapter_key(name), change.digest)
            if change.folder and change.digest and digest != change.digest:
                message = f"adapter {name} of node {hello.node.name} has other content than that of the fleet"
                raise RequestError(PAIRING_MISMATCH, message)
        return changes

    def _check_fingerprint(self, info: inference_pb2.NodeInfo, others: list[Node], changes: Collection[str]) -> None:
        """Compare the fingerprint with the others', but for adapters that operators have changed."""
        given = {key: value for key, value in info.fingerprint.items() if key not in map(adapter_key, changes)}
        known = {key: value for key, value in given.items() if key in self._facts}
        _compare(f"node {info.name} and the coordinator", known, self._facts)
        if others:  # all attached nodes have one fingerprint
            other = others[0].hello.node
            theirs = {key: value for key, value in other.fingerprint.items() if key not in map(adapter_key, changes)}
            _compare(f"nodes {info.name} and {other.name}", given, theirs)

    def _check_adapters(self, info: inference_pb2.NodeInfo) -> None:
        """Raise RequestError for too many adapters of a node, and for names that clients could not request."""
        adapters = adapters_in(info.fingerprint)
        if len(adapters) > MOST_ADAPTERS:
            message = f"node {info.name} has {len(adapters)} adapters, the limit is {MOST_ADAPTERS}"
            raise RequestError(BAD_PARAM, message)
        for name in adapters:
            if name in self._model_names or not ADAPTER_NAME.fullmatch(name):
                why = "is the model's own" if name in self._model_names else f"must match {ADAPTER_NAME.pattern}"
                raise RequestError(BAD_PARAM, f"the name of adapter {name!r:.80} of node {info.name} {why}")

    def _why_expired(self, node: Node, now: float) -> tuple[LossCause, str] | None:
        if (why := node.health.why_silent(self.pauses.awake_s(now))) is not None:
            return LossCause.SILENCE, why
        if node.step_age_s > self._step_timeout_s:
            return LossCause.STEP, f"one step has taken {node.step_age_s:.1f} s (limit {self._step_timeout_s:g} s)"
        return None


def _complete(node: Node, now: float) -> None:
    """Add to the node's load the fields that the coordinator knows."""
    load, health = node.load, node.health
    load.name, load.role = node.name, node.role
    load.shape.CopyFrom(shape_to_wire(node.shape))
    load.num_losses, load.longest_heartbeat_gap_s = health.num_losses(now), health.longest_gap_s
    _set_state(node)


def _set_state(node: Node) -> None:
    stays = not (node.is_drained or node.is_stopping)
    node.is_ready = stays and not node.lacks_adapters
    node.load.state = READY if stays else DRAINING


def _weights(load: inference_pb2.NodeLoad) -> StepWeights:
    """Return the step costs that the node reports, or a rough model from its other rates before it reports any."""
    weights = load.step_weights
    if len(weights) == len(StepWeights._fields) and all(0 <= each < math.inf for each in weights):
        return StepWeights(*weights)
    rate = load.prefill_tokens_per_s
    return StepWeights(step_s=load.lone_step_s, token_s=1 / rate if rate > 0 else 0.0)


def _checked(wire: inference_pb2.Shape, hello: fleet_pb2.Hello) -> Shape:
    """Return the shape that a node reports. Raises RequestError for a shape that it could not take."""
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
    remote_kvs = hello.remote_kvs
    if len(remote_kvs.holder.key) not in (0, KV_KEY_BYTES) or len(remote_kvs.holder.address) > MAX_NAME_CHARS:
        raise RequestError(
            BAD_PARAM, f"what node {info.name} says of remote KV is no address and a key of {KV_KEY_BYTES} bytes"
        )
    if remote_kvs.num_tokens > hello.num_blocks * hello.block_size:
        raise RequestError(
            BAD_PARAM, f"node {info.name} would hold {remote_kvs.num_tokens} tokens for others, over its pool"
        )
    if len(hello.kv_keys) > MAX_TP_SIZE or any(len(key) != KV_KEY_BYTES for key in hello.kv_keys):
        raise RequestError(BAD_PARAM, f"node {info.name} must have {MAX_TP_SIZE} keys of {KV_KEY_BYTES} bytes at most")


def check_version(name: str, version: str) -> None:
    """Raise RequestError if a process of this version may not serve with the coordinator."""
    if not is_within_skew(version, VERSION):
        apart = f"version is {version[:MAX_NAME_CHARS] or 'missing'} and {VERSION}, more than {MAX_SKEW} minor apart"
        raise RequestError(PAIRING_MISMATCH, f"{name} and the coordinator differ: {apart}")


def _compare(names: str, given: Mapping[str, str], expected: Mapping[str, str]) -> None:
    differences = [
        f"{key} is {given.get(key, 'missing'):.80} and {expected.get(key, 'missing'):.80}"
        for key in sorted(given.keys() | expected.keys())
        if given.get(key) != expected.get(key)
    ]
    if differences:
        raise RequestError(PAIRING_MISMATCH, f"{names} differ: {'; '.join(differences)}")


PARTS: Final = {PREFILL: ("prefills prompts", NO_PREFILL_WORKER), DECODE: ("decodes sequences", NO_DECODE_WORKER)}


def candidates(nodes: Collection[Node], role: str, num_tokens: int) -> list[Node]:
    """Return the ready nodes that can take the part `role` (PREFILL or DECODE) in a request of `num_tokens` tokens.

    How busy they are does not matter. Raises RequestError if there is none.
    """
    able = fitting(nodes, role, num_tokens)
    if not able:
        part, reason = PARTS[role]
        why = f"can hold {num_tokens} tokens" if fitting(nodes, role, 0) else "is ready"
        raise RequestError(reason, f"no node that {part} {why}")
    return able


def fitting(nodes: Iterable[Node], role: str, num_tokens: int) -> list[Node]:
    """Return the ready nodes that prefill (role PREFILL) or decode (DECODE), and can hold `num_tokens` tokens.

    The tokens are those of one request.
    """
    if role == PREFILL:
        return [node for node in nodes if node.prefills and node.is_ready and num_tokens <= node.max_request_tokens]
    return [node for node in nodes if node.decodes and node.is_ready and num_tokens <= node.max_request_tokens]


def does(node: Node, role: str) -> bool:
    """Return whether the node may be given prompts to prefill (PREFILL) or sequences to decode (DECODE)."""
    return node.prefills if role == PREFILL else node.decodes


def has_path(nodes: Iterable[Node], *others: Shape, embeds: bool = False) -> bool:
    """Return whether the ready nodes, with others of these shapes, can serve a request.

    That needs a mixed node, or a prefill node and a decode node that takes its KV
    transfers. With `embeds` a prefill node is enough.
    """
    shapes = [*(node.usable for node in nodes if node.is_ready), *others]
    if any(shape.prefills and (shape.decodes or embeds) for shape in shapes):
        return True
    return any(shape.prefills for shape in shapes) and any(
        shape.decodes and shape.accepts_transfers for shape in shapes
    )


def why_no_path(nodes: Sequence[Node], *, embeds: bool = False) -> str:
    """Return, in words, why the nodes can serve no request; empty if they can.

    With `embeds`, requests are for embeddings, for which a prefill node is enough.
    """
    if has_path(nodes, embeds=embeds):
        return ""
    for role, (part, _) in PARTS.items():
        if not fitting(nodes, role, 0):
            return f"no node that {part} is ready"
    return "no ready node takes the KV transfers of prefill nodes"


MAX_PAIRS: Final = 100  # pairs of kinds that are reported
MAX_WORDS_CHARS: Final = 120  # of the words of one side in a difference


def num_kinds(nodes: Iterable[Node]) -> int:
    """Return the number of distinct numerics among the nodes; nodes that report no numerics are left out."""
    return len({_kind(node) for node in nodes if node.numerics})


class Kinds:
    """Report each pair of nodes with different numerics once: their outputs may differ in bits."""

    def __init__(self) -> None:
        self._reported: set[frozenset[object]] = set()

    def meet(self, node: Node, nodes: Iterable[Node]) -> list[str]:
        """Return a sentence for each of `nodes` whose numerics differ from those of `node`, each pair of numerics once.

        Nodes that report no numerics are left out, and pairs beyond MAX_PAIRS.
        """
        sentences = []
        for other in nodes:
            if not node.numerics or not other.numerics or _kind(node) == _kind(other):
                continue
            pair = frozenset((_kind(node), _kind(other)))
            if pair not in self._reported and len(self._reported) < MAX_PAIRS:
                self._reported.add(pair)
                sentences.append(_sentence(node, other))
        return sentences


def _kind(node: Node) -> frozenset[tuple[str, str]]:
    return frozenset(node.numerics.items())


def _sentence(node: Node, other: Node) -> str:
    unlike = "; ".join(_differences(node.numerics, other.numerics))
    return f"outputs of nodes {node.name} and {other.name} may differ in bits, as the nodes differ in {unlike}"


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return, for each fact that differs, the words that only one node has and the words that only the other has."""
    pairs = {key: (one.get(key, "").split(), other.get(key, "").split()) for key in sorted({*one, *other})}
    return [
        f"{key} ({_words_without(ours, theirs)} / {_words_without(theirs, ours)})"
        for key, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def _words_without(words: Sequence[str], others: Sequence[str]) -> str:
    return " ".join(word for word in words if word not in others)[:MAX_WORDS_CHARS] or "-"
