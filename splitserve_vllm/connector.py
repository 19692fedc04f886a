"""Connect vLLM's KV cache to our data plane: the KV connector that vLLM loads into its scheduler and its workers.

A prompt that another node decodes: a worker sends each layer's blocks as they are computed, to the receiver that a
transfer descriptor names. vLLM keeps the blocks of a finished request until the node has released them.

A prompt that another node prefills: vLLM allocates the blocks, which are the credit; the worker opens them to the
sender and reports the transfer descriptor to the node. vLLM goes on once all blocks are verified and in place.
"""

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import group_kernel_blocks

from serving_core.errors import SettingsError
from serving_core.process import failpoints
from serving_core.process.child import die_with
from splitserve_vllm.scheduling import Scheduling, StepTransfers
from splitserve_vllm.settings import OUR_ORDER
from splitserve_vllm.store import OrderedStore, VllmStore, places_in_block
from splitserve_vllm.worker import Worker

KVConnectorMetadata.register(StepTransfers)


class SplitServeConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One side of the connector: in vLLM's scheduler or in one of its workers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = self._kv_transfer_config.kv_connector_extra_config
        # However the node's process ends, nothing of vLLM is left: its scheduler is the node's child.
        if not die_with(config["node_pid"] if role is KVConnectorRole.SCHEDULER else os.getppid()):
            raise SettingsError("the node has ended while vLLM was starting")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise SettingsError("a model whose layers have several kinds of KV cache cannot be sent between nodes")
        block_size = vllm_config.cache_config.block_size
        self._scheduling = Scheduling(block_size)
        self._worker: Worker | None = None
        if role is KVConnectorRole.WORKER:
            failpoints.arm()  # tests stop it in the middle of a transfer
        self._block_size = block_size

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True: in a CUDA graph over attention, no layer would be reported when it is computed."""
        return True

    # ---- in a worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_transfer_config.kv_connector_extra_config
        # Kernels may divide the scheduler's blocks into smaller ones.
        num_blocks = self._kv_cache_config.num_blocks
        kv_caches = {name: group_kernel_blocks(cache, num_blocks) for name, cache in kv_caches.items()}
        store = VllmStore(kv_caches, self._block_size)
        tp_size = self._vllm_config.parallel_config.tensor_parallel_size
        num_kv_heads = store.layout.num_kv_heads * tp_size
        if config["kv_order"] == OUR_ORDER:
            store = OrderedStore(kv_caches, self._block_size, _places(next(iter(kv_caches.values()))))
            num_kv_heads = self._vllm_config.model_config.get_total_num_kv_heads()
        whole = store.layout.with_heads(num_kv_heads)
        self._worker = Worker(store, config, whole, get_tensor_model_parallel_rank(), tp_size)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        assert isinstance(connector_metadata, StepTransfers)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: the blocks were opened when the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM computes with a request once all of its blocks are here."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests that are sent, received and failed here; vLLM waits until all workers report one."""
        assert self._worker is not None
        results = self._worker.take_results()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---- in the scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.num_to_load(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepTransfers:
        return self._scheduling.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, bool(block_ids)), None


def _places(cache: torch.Tensor) -> torch.Tensor:
    """Return where vLLM's kernels have each value of a block. Raises SettingsError for a layout that is not known."""
    if cache.device.type != "cpu" or cache.dim() != 4:
        raise SettingsError("--kv-order splitserve is for vLLM on CPUs, with K and V by head")

    def pack(block: torch.Tensor) -> None:
        current_platform.pack_kv_cache(kv_cache=block, indices=torch.tensor([0]))

    return places_in_block(cache.shape[1:], cache.dtype, pack)
