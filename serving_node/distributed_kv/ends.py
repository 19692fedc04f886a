"""Run both ends of distributed KV: place tiles of own requests on other nodes, hold tiles of others."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from engine.attention.distributed import TILE_KEYS
from engine.engine import Engine
from kv_transfer.descriptor import holder_address_of
from kv_transfer.distributed_kv.holder import KVHolder
from kv_transfer.distributed_kv.remote_kv import RemoteKV, most_tiles_of, open_remote_kv
from kv_transfer.distributed_kv.wire import KEY_BYTES, TileRequest
from kv_transfer.results import TransferError
from serving_core.errors import SettingsError
from serving_core.node.requests import NodeRequest
from serving_node.decisions import CloseRemoteKV, OpenRemoteKV, RevokeRemoteKV
from serving_node.settings import NodeSettings

logger = logging.getLogger(__name__)

MAX_OPENING: Final = 4  # at a time; further ones wait
LOOP_S: Final = 5.0  # for the event loop to lease blocks

T = TypeVar("T")


def tile_tokens(settings: NodeSettings, engine: Engine) -> int:
    """Return the number of tokens of a tile, the unit of distributed KV; 0 if the settings switch it off.

    Raises SettingsError if distributed KV is switched on and the engine does not support it.
    """
    if not settings.distributed_kv:
        return 0
    if not engine.holds_remote_kv:
        raise SettingsError(
            "--distributed-kv is for one rank of one stage that computes all with the compiled kernels, "
            "without windows, in blocks that divide 256 tokens (docs/reference/limits.md)"
        )
    return TILE_KEYS


class RemoteKVEnds:
    """Connects the node's scheduler to KV holders (other nodes), and to clients of this node's own holder.

    Created in the node's event loop, if distributed KV is switched on.
    """

    def __init__(
        self,
        settings: NodeSettings,
        engine: Engine,
        lease: Callable[[int, int, TileRequest], list[int]],
        release: Callable[[int], None],
        on_opened: Callable[[NodeRequest, RemoteKV | None], None],
    ) -> None:
        """Listen for tiles of other nodes.

        `lease`, `release` and `on_opened` are called in the event loop. Raises SettingsError if it cannot listen.
        """
        self._loop = asyncio.get_running_loop()
        self._pool, self._layers = engine.pool, engine.layout.layers
        self._blocks_each = TILE_KEYS // engine.layout.block_size
        self._most_tiles = most_tiles_of(engine.layout, TILE_KEYS)
        self._lease, self._release, self._on_opened = lease, release, on_opened
        self._threads = ThreadPoolExecutor(MAX_OPENING, thread_name_prefix="remote_kvs")
        self.key: Final = secrets.token_bytes(KEY_BYTES)
        partials = engine.partial_attention()
        self._sizes = {"row_bytes": partials.row_bytes, "partial_bytes": partials.partial_bytes}
        where = holder_address_of(settings.kv_transport, settings.kv_bind)
        self._host = KVHolder(*where, self.key, engine.pool, partials, self._leased, self._released, TILE_KEYS)

    @property
    def address(self) -> str:
        return self._host.address

    def carry_out(self, decision: OpenRemoteKV | RevokeRemoteKV | CloseRemoteKV) -> None:
        """Carry out a decision, without waiting for its end.

        The result of OpenRemoteKV goes to `on_opened`; revoked blocks are returned by `release`.
        """
        match decision:
            case OpenRemoteKV():
                self._begin(decision)
            case RevokeRemoteKV(number=number):
                self._host.revoke(number)
            case CloseRemoteKV(remote_kvs=remote_kvs):
                for remote_kv in remote_kvs:
                    remote_kv.close()

    def _begin(self, decision: OpenRemoteKV) -> None:
        opening = self._threads.submit(self._open, decision)

        def report(ended: "Future[RemoteKV | None]") -> None:
            if error := ended.exception():
                logger.error("remote KV was not opened", exc_info=error)
            remote_kv = None if error else ended.result()
            self._in_loop(lambda: self._on_opened(decision.node_request, remote_kv))

        opening.add_done_callback(report)

    def close(self) -> None:
        """Close the holder and end the threads.

        Call outside the event loop, which releases the held blocks meanwhile.
        """
        self._host.close()
        self._threads.shutdown(wait=True)

    def _open(self, decision: OpenRemoteKV) -> RemoteKV | None:
        """Place tiles on the first host with room; None without such a host."""
        distributed, block_ids = decision.node_request.distributed, decision.block_ids
        assert distributed is not None
        tile_request = TileRequest(decision.node_request.age, decision.is_again, distributed.longest_step_s)

        def read(layer: int, num_tiles: int) -> tuple[memoryview, memoryview]:
            return self._pool.read(layer, block_ids[: num_tiles * self._blocks_each])

        most_tiles = min(len(block_ids) // self._blocks_each, self._most_tiles)
        for host in distributed.holders:
            try:
                remote_kv = open_remote_kv(
                    host.address,
                    host.key,
                    most_tiles,
                    self._layers,
                    read,
                    tile_request=tile_request,
                    **self._sizes,
                )
            except (OSError, ValueError, TransferError) as error:
                logger.warning("a node takes no blocks of a request: %s", error or type(error).__name__)
                continue
            if remote_kv is not None:
                return remote_kv
        return None

    def _leased(self, number: int, most_tiles: int, tile_request: TileRequest) -> list[int]:
        leased: Future[list[int]] = Future()
        self._in_loop(lambda: leased.set_result(self._lease(number, most_tiles, tile_request)))
        return leased.result(LOOP_S)

    def _released(self, number: int) -> None:
        self._in_loop(lambda: self._release(number))

    def _in_loop(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed, and the pool with it
            logger.debug("remote KV ends after its node")
