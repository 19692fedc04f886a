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


RunBetweenSteps = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a short function in the engine's thread between two steps, and returns its result."""


async def load_on_rank(engine: Engine, run_between_steps: RunBetweenSteps, root: str, name: str, folder: str) -> str:
    """Load an adapter on this rank beside the steps, and return the digest of its content.

    `folder` is a path within `root`, the node's --lora-root. Raises ModelError, with nothing loaded, if the adapter
    cannot be read or used.
    """
    place, end = folder_within(root, name, folder), object()
    try:
        adapter = await asyncio.to_thread(read_adapter, name, place, engine.config)
        digest = await asyncio.to_thread(adapter.digest)
        loading = load_adapter(engine, adapter)
        while await run_between_steps(partial(next, loading, end)) is not end:
            pass
    except ModelError as error:
        raise ModelError(str(error).replace(str(place), folder)) from error  # clients know the folder by this name
    except (MemoryError, RuntimeError) as error:
        raise ModelError(cause_of(error)) from error
    if await asyncio.to_thread(adapter.digest) != digest:
        await run_between_steps(partial(unload_adapter, engine, name))
        raise ModelError(f"the file of adapter {name} has changed while it was read")
    return digest


def folder_within(root: str, name: str, folder: str) -> Path:
    """Return the folder of the adapter `name` as a resolved path: `folder` is absolute, or relative to `root`.

    `root` is the node's --lora-root. Raises ModelError if it is empty, if the folder is outside of it, or for a name
    that no adapter may have.
    """
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
    """Loads and unloads adapters on a follower when rank 0 orders it. Belongs to one event loop."""

    def __init__(self, engine: Engine, run_between_steps: RunBetweenSteps, leader: Leader, root: str) -> None:
        self._engine = engine
        self._run_between_steps = run_between_steps
        self._leader = leader
        self._root = root
        self._loading: asyncio.Task[None] | None = None

    def load(self, order: fleet_pb2.LoadAdapter) -> None:
        """Begin to load an adapter beside the steps; its end, or its error, is reported to rank 0.

        Rank 0 orders one at a time.
        """
        self._loading = asyncio.create_task(self._load(order))

    async def unload(self, name: str) -> None:
        """Unload an adapter between two steps."""
        await self._run_between_steps(partial(unload_adapter, self._engine, name))

    async def _load(self, order: fleet_pb2.LoadAdapter) -> None:
        changed = fleet_pb2.AdapterChanged(name=order.name)
        try:
            changed.digest = await load_on_rank(
                self._engine, self._run_between_steps, self._root, order.name, order.folder
            )
        except ModelError as error:
            changed.error = str(error)[:MAX_ERROR_CHARS]
        except Exception as error:
            changed.error = cause_of(error)
            logger.exception("adapter %s was not loaded", order.name)
        self._leader.send(adapter_changed=changed)


class NodeAdapters:
    """Carries out LoadAdapter and UnloadAdapter on all ranks, one after the other. Belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        run_between_steps: RunBetweenSteps,
        followers: Followers,
        fingerprint: MutableMapping[str, str],
        root: str,
        *,
        report: Callable[[fleet_pb2.AdapterChanged], None],
    ) -> None:
        """Create the port of the adapters under `root`, the node's --lora-root.

        Loaded adapters are added to the node's `fingerprint`, and unloaded ones removed. `report` is called at the end
        of each decision.
        """
        self.folders: dict[str, str] = {}  # of the adapters that were loaded at run time
        self._engine = engine
        self._run_between_steps = run_between_steps
        self._followers = followers
        self._fingerprint = fingerprint
        self._root = root
        self._report = report
        self._ordered: asyncio.Queue[LoadAdapter | UnloadAdapter] = asyncio.Queue()
        self._replies: dict[int, fleet_pb2.AdapterChanged] = {}  # by followers, of the load under way
        self._has_all_replies = asyncio.Event()
        followers.on_adapter_changed = self._follower_replied

    def carry_out(self, decision: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(decision, UnloadAdapter):
            self._fingerprint.pop(adapter_key(decision.name), None)  # from now on requests with it are refused
            self.folders.pop(decision.name, None)
        self._ordered.put_nowait(decision)

    async def run(self) -> None:
        """Carry out the decisions given to `carry_out`, and report the end of each, until cancelled."""
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
        self._replies.clear()
        self._has_all_replies.clear()
        self._followers.send(load_adapter=fleet_pb2.LoadAdapter(name=order.name, folder=order.folder))
        digest, errors = "", list[str]()
        try:
            digest = await load_on_rank(self._engine, self._run_between_steps, self._root, order.name, order.folder)
        except ModelError as error:
            errors.append(str(error))
        if len(self._followers):
            await self._has_all_replies.wait()  # a follower that is lost is the end of the node
        for rank, reply in sorted(self._replies.items()):
            if reply.error or reply.digest != digest:
                errors.append(f"rank {rank}: {reply.error or 'its files differ'}")
        if errors:
            await self._unload(order.name)
            raise ModelError("; ".join(errors))
        self._fingerprint[adapter_key(order.name)] = digest
        self.folders[order.name] = order.folder
        logger.info("adapter %s is loaded", order.name)
        return digest

    async def _unload(self, name: str) -> None:
        self._followers.send(unload_adapter=fleet_pb2.UnloadAdapter(name=name))
        await self._run_between_steps(partial(unload_adapter, self._engine, name))

    def _follower_replied(self, rank: int, changed: fleet_pb2.AdapterChanged) -> None:
        self._replies[rank] = changed
        if len(self._replies) == len(self._followers):
            self._has_all_replies.set()
