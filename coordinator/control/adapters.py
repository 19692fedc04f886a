"""Decide which LoRA adapters the nodes load and unload while they serve. Pure.

Nodes start with the adapters of --lora. An operator's change of one name holds until the next change of that name:
every node that attaches later is brought to it. Requests may name an adapter once every attached node has the same
content of it, and may not from the order to unload it on. Nodes unload it when no request runs with it any more, so
that requests that have begun finish with the weights that they began with.
"""

import logging
from collections.abc import Callable
from typing import Final

from coordinator.control.instructions import Send
from coordinator.control.nodes import AdapterChange, Node, Registry
from protos import fleet_pb2
from serving_core.errors import RequestError
from serving_core.model_files.adapter_names import ADAPTER_NAME, MOST_ADAPTERS, adapter_key
from serving_core.reasons import BAD_PARAM, DEADLINE_EXCEEDED, MODEL_NOT_FOUND, NO_PREFILL_WORKER, PAIRING_MISMATCH

logger = logging.getLogger(__name__)

LOAD_DEADLINE_S: Final = 120.0
RETRY_S: Final = 1.0  # until a node whose requests used the adapter is told again to unload it
RETRY_FAILED_S: Final = 30.0  # until a node that could not load an adapter is told again
MAX_FOLDER_CHARS: Final = 4096
MAX_CHANGES: Final = 1024  # names that were loaded or unloaded while nodes served


class FleetAdapters:
    """Load and unload LoRA adapters on all nodes as the operator has ordered, and keep errors of failed loads.

    Every method that returns commands returns those to send to nodes now.
    """

    def __init__(self, registry: Registry, num_using: Callable[[str], int]) -> None:
        """Create the keeper. `num_using` returns the number of live sequences that run with an adapter."""
        self._registry = registry
        self._num_using = num_using
        self._deadlines_s: dict[str, float] = {}  # of adapters that are being loaded
        self._errors: dict[str, RequestError] = {}  # of the last load of a name, if it failed

    def load(self, name: str, folder: str, now: float) -> list[Send]:
        """Begin to load the adapter in `folder` on every node under `name`; `outcome` says how that ends.

        Raises RequestError when the name is in use, too many adapters are loaded, or no node is attached.
        """
        self._check_new(name, folder)
        self._errors.pop(name, None)
        self._deadlines_s[name] = now + LOAD_DEADLINE_S
        for node in self._registry.nodes:
            node.adapter_retry_s.pop(name, None)
        self._change(name, AdapterChange(folder))
        return self.tick(now)

    def outcome(self, name: str) -> RequestError | None:
        """Return the error of the last load of this name; None when it succeeded, so that requests may name it.

        Call it when `is_loading` is False.
        """
        return self._errors.get(name)

    def is_loading(self, name: str) -> bool:
        return name in self._deadlines_s

    def unload(self, name: str, now: float) -> list[Send]:
        """Refuse requests for the adapter from now on, and unload it on each node when no request runs with it.

        Raises RequestError when no adapter of this name is loaded.
        """
        if name not in (self._registry.adapters or ()):
            raise RequestError(MODEL_NOT_FOUND, f"no adapter {name[:80]!r} is loaded", field="name")
        self._change(name, AdapterChange(""))
        return self.tick(now)

    def changed(self, node: Node, event: fleet_pb2.AdapterChanged, now: float) -> list[Send]:
        """Record that a node has loaded or unloaded an adapter, or could not.

        A load ends with an error when one node cannot load it, or nodes have different files of it. The end of a load
        that a later order has overtaken says nothing of that order: what the node has loaded it unloads again.
        """
        name, change = event.name, self._registry.adapter_changes.get(event.name)
        folder = node.adapter_orders.pop(name, None)
        if folder and (change is None or change.folder != folder):
            return self.tick(now) if event.error else self._order_unload(node, name, now)
        if event.error:
            self._failed(node, event, now, is_load=bool(folder))
        elif change is not None and change.digest and event.digest not in ("", change.digest):
            return self._differs(node, name, change, now)
        else:
            self._registry.note_adapter(node, name, event.digest)
            if change is not None and change.folder:
                change.digest = change.digest or event.digest
        return self.tick(now)

    def tick(self, now: float) -> list[Send]:
        """End loads that have succeeded or taken too long, and return the commands that nodes lack."""
        for name, deadline_s in list(self._deadlines_s.items()):
            if now > deadline_s:
                problem = f"adapter {name} was not loaded on every node within {LOAD_DEADLINE_S:g} s"
                self._fail(name, RequestError(DEADLINE_EXCEEDED, problem))
            elif self._is_on_every_node(name):
                del self._deadlines_s[name]
                self._registry.adapter_changes[name].is_served = True
                self._registry.serve_adapters()
                logger.info("adapter %s is loaded on every node", name)
        return [order for node in self._registry.nodes for order in self._orders(node, now)]

    def _check_new(self, name: str, folder: str) -> None:
        registry = self._registry
        if not ADAPTER_NAME.fullmatch(name):
            raise _bad("name", f"must match {ADAPTER_NAME.pattern}, not {name[:80]!r}")
        if not folder or len(folder) > MAX_FOLDER_CHARS:
            raise _bad("folder", f"must have 1 to {MAX_FOLDER_CHARS} characters, not {len(folder)}")
        served = registry.adapters or ()
        if name in served or registry.is_model_name(name) or name in self._deadlines_s:
            raise _bad("name", f"({name}) is a name that is served or being loaded already")
        if num := self._num_using(name):
            raise _bad("name", f"({name}) is of an adapter that was unloaded, and {num} requests still run with it")
        if any(adapter_key(name) in node.hello.node.fingerprint for node in registry.nodes):
            raise _bad("name", f"({name}) is of an adapter that nodes are unloading: try again")
        if (num := len(served) + len(self._deadlines_s)) >= MOST_ADAPTERS:
            raise _bad("name", f"({name}) would be one adapter more than {num}, and the limit is {MOST_ADAPTERS}")
        if not registry.nodes:
            raise RequestError(NO_PREFILL_WORKER, "no node is attached that could load an adapter")

    def _is_on_every_node(self, name: str) -> bool:
        nodes = self._registry.nodes
        return bool(nodes) and all(adapter_key(name) in node.hello.node.fingerprint for node in nodes)

    def _differs(self, node: Node, name: str, change: AdapterChange, now: float) -> list[Send]:
        """Have a node unload an adapter whose files differ from the fleet's.

        That ends a load under way. Where the adapter is served, the node alone gets no requests until the files agree.
        """
        logger.warning("%s %s has other files of adapter %s than other nodes", node.kind, node.name, name)
        if not change.is_served:
            self._fail(name, RequestError(PAIRING_MISMATCH, f"the files of adapter {name} differ between nodes"))
        node.adapter_retry_s[name] = now + RETRY_FAILED_S
        return self._order_unload(node, name, now)

    def _order_unload(self, node: Node, name: str, now: float) -> list[Send]:
        """Have a node unload an adapter that it does not count as having."""
        node.adapter_orders[name] = ""
        return [Send(node, _unload(name)), *self.tick(now)]

    def _failed(self, node: Node, event: fleet_pb2.AdapterChanged, now: float, *, is_load: bool) -> None:
        node.adapter_retry_s[event.name] = now + (RETRY_FAILED_S if is_load else RETRY_S)
        if not is_load:
            return
        logger.warning("%s %s has not loaded adapter %s: %s", node.kind, node.name, event.name, event.error)
        if event.name in self._deadlines_s:
            self._fail(event.name, _bad("folder", f"cannot be loaded on node {node.name}: {event.error}"))

    def _fail(self, name: str, error: RequestError) -> None:
        """End a load with an error: nodes that have the adapter unload it."""
        if self._deadlines_s.pop(name, None) is not None:
            self._errors[name] = error
        self._change(name, AdapterChange(""))

    def _change(self, name: str, change: AdapterChange) -> None:
        """Store a change, and forget the oldest adapters that are unloaded beyond MAX_CHANGES."""
        changes = self._registry.adapter_changes
        changes.pop(name, None)
        changes[name] = change
        num_too_many = max(0, len(changes) - MAX_CHANGES)
        for old in [each for each, change in changes.items() if not change.folder][:num_too_many]:
            del changes[old]
        self._errors = {each: error for each, error in self._errors.items() if each in changes}
        self._registry.serve_adapters()

    def _orders(self, node: Node, now: float) -> list[Send]:
        orders = []
        for name, change in self._registry.adapter_changes.items():
            has_it = adapter_key(name) in node.hello.node.fingerprint
            if name in node.adapter_orders or now < node.adapter_retry_s.get(name, now):
                continue
            if change.folder and not has_it:
                command = fleet_pb2.NodeCommand(load_adapter=fleet_pb2.LoadAdapter(name=name, folder=change.folder))
            elif not change.folder and has_it and not self._num_using(name):
                command = _unload(name)
            else:
                continue
            node.adapter_orders[name] = change.folder
            orders.append(Send(node, command))
        return orders


def _unload(name: str) -> fleet_pb2.NodeCommand:
    return fleet_pb2.NodeCommand(unload_adapter=fleet_pb2.UnloadAdapter(name=name))


def _bad(field: str, problem: str) -> RequestError:
    return RequestError(BAD_PARAM, f"{field} {problem}", field=field)
