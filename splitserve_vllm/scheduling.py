"""Follow the blocks of requests with a KV transfer in vLLM's scheduler. No I/O; imports no vLLM.

The objects that come in are those that vLLM passes to a KV connector.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from splitserve_vllm.sampling import TRANSFER

SEND: Final = "splitserve_send"
RECEIVE: Final = "splitserve_receive"
"""Keys of a request's transfer parameters; the value is the epoch of the attempt."""
SENDERS: Final = "splitserve_senders"
"""Key beside RECEIVE: the tensor-parallel size and the number of stages of the node that sends."""
ADDRESSES: Final = "splitserve_addresses"
"""Key beside RECEIVE: the addresses of this node's workers, by tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that vLLM has allocated for a prompt that another node prefills."""

    epoch: int
    request_id: str
    block_ids: list[int]
    num_cached_blocks: int  # of them, which need no transfer
    num_tokens: int
    addresses: list[str]  # of this node's workers
    prefill_tp: int = 1  # of the node that sends, as is the next
    prefill_pp: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """The final leading blocks of a prompt that another node decodes, once the step is done."""

    epoch: int
    block_ids: list[int]


@dataclass(slots=True)
class StepTransfers:
    """What the scheduler's side tells the workers about one step."""

    loads: list[Load] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)  # finished requests whose blocks are kept, with their epochs
    dropped: list[int] = field(default_factory=list)  # epochs whose blocks are free again


@dataclass(slots=True)
class _Prompt:
    epoch: int
    num_tokens: int
    block_ids: list[int] = field(default_factory=list)


class Scheduling:
    """The scheduler's side: follows the blocks of requests with a transfer. No I/O."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prompts: dict[str, _Prompt] = {}  # that other nodes decode, by vLLM's request id
        self._loaded: set[str] = set()  # requests whose blocks were opened, once
        self._next = StepTransfers()

    def num_to_load(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens come from another node: all that are not cached, for a prompt that it prefills."""
        if RECEIVE not in _params(request) or request.request_id in self._loaded:
            return 0, False  # one that was preempted is computed again here
        return request.num_prompt_tokens - num_computed_tokens, True

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Note the blocks of a request that `num_external_tokens` tokens come for."""
        num_tokens = request.num_prompt_tokens
        num_blocks = -(-num_tokens // self._block_size)
        num_cached = (num_tokens - num_external_tokens) // self._block_size
        self._loaded.add(request.request_id)
        params, blocks = _params(request), list(block_ids[:num_blocks])
        senders = params.get(SENDERS, (1, 1))
        load = Load(params[RECEIVE], request.request_id, blocks, num_cached, num_tokens, params[ADDRESSES], *senders)
        self._next.loads.append(load)

    def step(self, output: Any) -> StepTransfers:
        """Return what the workers must know of a step."""
        made, self._next = self._next, StepTransfers()
        for new in output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args if new.sampling_params is not None else None
            epoch = ((extra or {}).get(TRANSFER) or {}).get(SEND)
            if epoch is not None:
                self._prompts[new.req_id] = _Prompt(epoch, len(new.prompt_token_ids), list(new.block_ids[0]))
                made.chunks.append(self._chunk(new.req_id, new.num_computed_tokens, output))
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new_blocks, num_computed in rows:
            if (prompt := self._prompts.get(request_id)) is None:
                continue
            if request_id in cached.resumed_req_ids:  # it was preempted: its earlier blocks are of others
                made.dropped.append(prompt.epoch)
                prompt.block_ids = []
            if new_blocks is not None:
                prompt.block_ids += new_blocks[0]
            made.chunks.append(self._chunk(request_id, num_computed, output))
        return made

    def _chunk(self, request_id: str, num_computed: int, output: Any) -> Chunk:
        prompt = self._prompts[request_id]
        num_done = num_computed + output.num_scheduled_tokens[request_id]
        is_whole = num_done >= prompt.num_tokens
        num_final = -(-prompt.num_tokens // self._block_size) if is_whole else num_done // self._block_size
        return Chunk(prompt.epoch, prompt.block_ids[:num_final])

    def finished(self, request: Any, has_blocks: bool) -> bool:
        """Return whether vLLM must keep the blocks of a finished request.

        Those of an aborted request are free at once: its transfer is cancelled before the next step writes to them, and
        the receiver takes nothing of a cancelled transfer.
        """
        self._loaded.discard(request.request_id)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return False
        if not has_blocks or request.status.name == "FINISHED_ABORTED":
            self._next.dropped.append(prompt.epoch)
            return False
        self._next.held[request.request_id] = prompt.epoch
        return True


def _params(request: Any) -> dict[str, Any]:
    return request.kv_transfer_params or {}
