"""Load and unload LoRA adapters on all ranks of a node while it serves.

Rank 0 reads the adapter's headers and digest, and has every rank load its part between steps, one projection at a time.
The adapter enters the node's fingerprint once every rank has the same content, and leaves it before it is unloaded.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from engine.adapters import load_adapter, unload_adapter
from engine.engine import Engine
from engine.stepper import cause_of
from protos import fleet_pb2
from serving_core.errors import ModelError
from serving_core.model_files.adapter_names import ADAPTER_NAME, adapter_key, adapters_in
from serving_core.model_files.adapters import read_adapter
from serving_node.decisions import LoadAdapter, UnloadAdapter
from serving_node.ranks.leading import Followers, Leader

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS: Final = 500


Aside = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a short function in the engine's thread between two steps."""


async def load_on_rank(engine: Engine, aside: Aside, root: str, name: str, folder: str) -> str:
    """Load an adapter on this rank, and return the digest of its content. Raises ModelError."""
    place, end = folder_within(root, name, folder), object()
    try:
        adapter = await asyncio.to_thread(read_adapter, name, place, engine.config)
        digest = await asyncio.to_thread(adapter.digest)
        loading = load_adapter(engine, adapter)
        while await aside(partial(next, loading, end)) is not end:
            pass
    except ModelError as error:
        raise ModelError(str(error).replace(str(place), folder)) from error  # clients know the folder by this name
    except (MemoryError, RuntimeError) as error:
        raise ModelError(cause_of(error)) from error
    if await asyncio.to_thread(adapter.digest) != digest:
        await aside(partial(unload_adapter, engine, name))
        raise ModelError(f"the file of adapter {name} has changed while it was read")
    return digest


def folder_within(root: str, name: str, folder: str) -> Path:
    """Return the folder of an adapter, which must be within --lora-root. Raises ModelError."""
    if not root:
        raise ModelError("the node loads no adapters: it was started without --lora-root")
    if not ADAPTER_NAME.fullmatch(name):
        raise ModelError(f"an adapter's name must match {ADAPTER_NAME.pattern}, not {name!r:.200}")
    top = Path(root).resolve()
    place = (top / folder).resolve()
    if not place.is_relative_to(top):
        raise ModelError("the folder is outside of --lora-root")
    return place


class FollowerAdapters:
    """Carry out the orders of rank 0 on a follower. Belongs to one event loop."""

    def __init__(self, engine: Engine, aside: Aside, leader: Leader, root: str) -> None:
        self._engine = engine
        self._aside = aside
        self._leader = leader
        self._root = root
        self._loading: asyncio.Task[None] | None = None

    def load(self, order: fleet_pb2.LoadAdapter) -> None:
        """Begin to load an adapter beside the steps; rank 0 orders one at a time."""
        self._loading = asyncio.create_task(self._load(order))

    async def unload(self, name: str) -> None:
        """Unload an adapter between two steps."""
        await self._aside(partial(unload_adapter, self._engine, name))

    async def _load(self, order: fleet_pb2.LoadAdapter) -> None:
        changed = fleet_pb2.AdapterChanged(name=order.name)
        try:
            changed.digest = await load_on_rank(self._engine, self._aside, self._root, order.name, order.folder)
        except ModelError as error:
            changed.error = str(error)[:MAX_ERROR_CHARS]
        except Exception as error:
            changed.error = cause_of(error)
            logger.exception("adapter %s was not loaded", order.name)
        self._leader.send(adapter_changed=changed)


class NodeAdapters:
    """Carry out LoadAdapter and UnloadAdapter, one after the other. Belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        aside: Aside,
        followers: Followers,
        fingerprint: MutableMapping[str, str],
        root: str,
        *,
        report: Callable[[fleet_pb2.AdapterChanged], None],
    ) -> None:
        """Create the port, which changes `fingerprint`."""
        self.folders: dict[str, str] = {}  # of the adapters that were loaded at run time
        self._engine = engine
        self._aside = aside
        self._followers = followers
        self._fingerprint = fingerprint
        self._root = root
        self._report = report
        self._ordered: asyncio.Queue[LoadAdapter | UnloadAdapter] = asyncio.Queue()
        self._told: dict[int, fleet_pb2.AdapterChanged] = {}  # by followers, of the load under way
        self._all_told = asyncio.Event()
        followers.on_adapter_changed = self._follower_told

    def carry_out(self, decision: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(decision, UnloadAdapter):
            self._fingerprint.pop(adapter_key(decision.name), None)  # from now on requests with it are refused
            self.folders.pop(decision.name, None)
        self._ordered.put_nowait(decision)

    async def run(self) -> None:
        """Carry out what is ordered until cancelled."""
        while True:
            order = await self._ordered.get()
            changed = fleet_pb2.AdapterChanged(name=order.name)
            try:
                if isinstance(order, LoadAdapter):
                    changed.digest = await self._load(order)
                else:
                    await self._unload(order.name)
                    logger.info("adapter %s is unloaded", order.name)
            except ModelError as error:
                changed.error = str(error)[:MAX_ERROR_CHARS]
                logger.warning("not loaded: %s", error)
            except Exception as error:
                changed.error = cause_of(error)
                logger.exception("adapter %s was not changed", order.name)
            self._report(changed)

    async def _load(self, order: LoadAdapter) -> str:
        if order.name in adapters_in(self._fingerprint):
            raise ModelError(f"adapter {order.name} is loaded already")
        self._told.clear()
        self._all_told.clear()
        self._followers.send(load_adapter=fleet_pb2.LoadAdapter(name=order.name, folder=order.folder))
        digest, errors = "", list[str]()
        try:
            digest = await load_on_rank(self._engine, self._aside, self._root, order.name, order.folder)
        except ModelError as error:
            errors.append(str(error))
        if len(self._followers):
            await self._all_told.wait()  # a follower that is lost is the end of the node
        for rank, told in sorted(self._told.items()):
            if told.error or told.digest != digest:
                errors.append(f"rank {rank}: {told.error or 'its files differ'}")
        if errors:
            await self._unload(order.name)
            raise ModelError("; ".join(errors))
        self._fingerprint[adapter_key(order.name)] = digest
        self.folders[order.name] = order.folder
        logger.info("adapter %s is loaded", order.name)
        return digest

    async def _unload(self, name: str) -> None:
        self._followers.send(unload_adapter=fleet_pb2.UnloadAdapter(name=name))
        await self._aside(partial(unload_adapter, self._engine, name))

    def _follower_told(self, rank: int, changed: fleet_pb2.AdapterChanged) -> None:
        self._told[rank] = changed
        if len(self._told) == len(self._followers):
            self._all_told.set()
