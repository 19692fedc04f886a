"""Run decode steps as CUDA graphs: the kernels of all layers and the head are launched at once instead of one by one.

A graph replays one shape at fixed addresses. So a batch is copied into persistent buffers, and padded to the next size
with a graph. A padding row is a request of one token in a scratch block, the pool's last block, which no request owns;
no other row reads what it writes. The ranks of a layer each have graphs of their part, with NCCL sums and gathers; all
ranks must agree that the capture works.

Other numbers of rows use other matrix products, and the attention kernel gets an upper bound instead of the longest
context. So logits may differ from the decoder's in their last bits, unless the bits of a row depend on no other row:
then they must be equal.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from engine.attention.paged import Attention, PortableAttention
from engine.attention.tiled import TiledAttention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch, build_batch
from engine.model.llama import LlamaDecoder
from engine.ops.base import Logits
from engine.parallel import RankGroup, on_all_ranks
from serving_core.errors import RankLost
from serving_core.requests import Share, Work

logger = logging.getLogger(__name__)

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # rows, ascending
WARM_UP_RUNS: Final = 2  # before the capture: libraries allocate and choose kernels in their first calls
TOLERANCE: Final = 0.05  # of the largest logit: 16-bit outputs of other kernels; a wrong row is off by about 1
SUMS_TOLERANCE: Final = 0.2  # where ranks also add 16-bit parts in an order that depends on the number of rows
MOST_CHECKED_TOKENS: Final = 700  # of a trial context

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Returns, for a function that uses the same memory each time, an equivalent function: on CUDA a graph."""


class StaticDecode:
    """Computes decode steps of one token per request at fixed sizes and addresses. Run in inference mode."""

    name = "CUDA graphs"
    moves_batches = False

    def __init__(
        self, decoder: LlamaDecoder, attention: Attention, num_blocks: int, max_model_len: int, capture: Capture
    ) -> None:
        """Capture all sizes. Call on all ranks.

        Requests own the first num_blocks blocks of the pool, which has one more, the only one written here.
        """
        assert attention.pool.num_blocks == num_blocks + 1
        block_size = attention.pool.layout.block_size
        self._decoder, self._attention = decoder, attention
        self.sizes: Final = sizes_for(num_blocks)
        self._padding = Share([0], 0, [num_blocks], samples=True)
        table_width = min(attention.pool.layout.num_blocks_for(max_model_len), num_blocks)
        padding = build_batch([self._padding] * self.sizes[-1], block_size, attention.pool.device)
        self._inputs = dataclasses.replace(
            padding,
            block_tables=functional.pad(padding.block_tables, (0, table_width - 1)),
            context_lengths=[table_width * block_size] * self.sizes[-1],
        )
        self._num_live_rows = 0  # buffer rows behind these are padding
        with torch.inference_mode():
            probe = self._forward(self.sizes[0])
        self._logits = None if probe is None else probe.new_zeros(self.sizes[-1], probe.shape[1])
        self._replays: dict[int, Callable[[], None]] = {}
        try:
            with torch.inference_mode():
                for size in reversed(self.sizes):  # the largest first: the smaller ones reuse its memory
                    self._replays[size] = capture(functools.partial(self._compute, size))
        except BaseException:
            self.close()  # the traceback holds this object, and closing a group waits for all graphs
            raise

    def plan(self, batch: ForwardBatch) -> int | None:
        """Return the captured size (in rows) that computes this batch; None if none does.

        The batch must be a decode step of one token per request, without adapters, with all logits wanted, that fits
        the buffers.
        """
        num_rows = len(batch.token_ids)
        fits = (
            not batch.adapted_rows
            and len(batch.kv_lengths) == len(batch.logit_rows) == num_rows <= self.sizes[-1]
            and batch.block_tables.shape[1] <= self._inputs.block_tables.shape[1]
        )
        return next(size for size in self.sizes if size >= num_rows) if fits else None

    def run(self, batch: ForwardBatch, plan: int, on_taken: Callable[[], None]) -> Logits | None:
        """Compute the batch with the graph of size `plan`; return its logits [B, vocab_size] on rank 0.

        Other ranks return None. The logits are valid until the next run. Calls `on_taken` when the batch is in the
        buffers.
        """
        num_rows = len(batch.token_ids)
        self._fill(batch, num_rows)
        on_taken()
        self._replays[plan]()
        return None if self._logits is None else Logits(self._logits[:num_rows])

    def plan_behind(self, batch: ForwardBatch, plan: int, works: Sequence[Work]) -> None:
        """Return None: the copy into the buffers takes any batch."""

    def close(self) -> None:
        """Release the graphs; the object cannot run afterwards."""
        self._replays.clear()

    def _fill(self, batch: ForwardBatch, num_rows: int) -> None:
        """Copy the batch into the first rows, and turn later rows that the batch before used into padding."""
        ours, left = self._inputs, slice(num_rows, self._num_live_rows)
        self._num_live_rows = max(self._num_live_rows, num_rows)  # also true if a copy fails
        for target, values in (
            (ours.token_ids, batch.token_ids),
            (ours.positions, batch.positions),
            (ours.slots, batch.slots),
            (ours.kv_lengths, batch.kv_lengths),
            (ours.block_tables[:, : batch.block_tables.shape[1]], batch.block_tables),
        ):
            target[:num_rows].copy_(values, non_blocking=True)
        if left.start < left.stop:
            (scratch_block,) = self._padding.block_ids
            ours.token_ids[left] = 0
            ours.positions[left] = 0
            ours.slots[left] = scratch_block * self._attention.pool.layout.block_size
            ours.kv_lengths[left] = 1
            ours.block_tables[left, 0] = scratch_block
        self._num_live_rows = num_rows

    def _compute(self, size: int) -> None:
        logits = self._forward(size)
        if self._logits is not None and logits is not None:
            self._logits[:size] = logits

    def _forward(self, size: int) -> torch.Tensor | None:
        batch = _first_rows(self._inputs, size)
        self._attention.pool.begin_steps(batch.slots)
        logits: torch.Tensor | None = self._decoder(batch, self._attention)
        return logits


def _first_rows(batch: ForwardBatch, num_rows: int) -> ForwardBatch:
    """Return views of the first rows of a batch with one token per request."""
    rows = slice(num_rows)
    return dataclasses.replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_starts=batch.query_starts[: num_rows + 1],
        kv_lengths=batch.kv_lengths[rows],
        block_tables=batch.block_tables[rows],
        logit_rows=batch.logit_rows[rows],
        starts=batch.starts[: num_rows + 1],
        context_lengths=batch.context_lengths[rows],
    )


def sizes_for(num_blocks: int) -> tuple[int, ...]:
    """Return the numbers of rows, from SIZES, to capture if every request has at least one of num_blocks blocks."""
    largest = next((size for size in SIZES if size >= num_blocks), SIZES[-1])
    return tuple(size for size in SIZES if size <= largest)


class CannotCapture(RuntimeError):
    """The computation cannot be captured as a CUDA graph; raised on all ranks alike."""


class CudaCapture:
    """Captures CUDA graphs of one device. They share their memory, and so must run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture what the function launches; return a function that replays it.

        Raises CannotCapture if a graph cannot hold what the function does.
        """
        # Restores the outer stream even if a failed capture has left its own as the current one.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_RUNS):
                    function()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            try:
                with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
                    function()
            except (RuntimeError, RankLost) as error:  # RankLost: the group's error for a sum that cannot be captured
                raise CannotCapture(str(error) or type(error).__name__) from error
        return graph.replay


def checked_decode(
    decoder: LlamaDecoder,
    attention: Attention,
    num_blocks: int,
    max_model_len: int,
    capture: Capture,
    group: RankGroup,
    tolerance: float = TOLERANCE,
) -> StaticDecode | None:
    """Return a StaticDecode whose logits agree with the decoder's at all sizes, or None on all ranks.

    The reason of None is logged. Requests own the first num_blocks blocks of the pool, and have up to max_model_len
    tokens. `capture` makes a graph of a function; `tolerance` is the largest difference, as a share of the largest
    logit. Call before the pool holds data. Raises RankLost if one of several ranks fails in a common computation, since
    the others cannot know.
    """

    def together(function: Callable[[], None]) -> Callable[[], None]:  # runs on all ranks before the capture
        return on_all_ranks(group, CannotCapture, lambda: capture(function))

    try:
        program = StaticDecode(decoder, attention, num_blocks, max_model_len, together)
        difference = _largest_difference(program, decoder, attention, min(max_model_len, MOST_CHECKED_TOKENS))
    except RuntimeError as error:
        if group.size > 1 and not isinstance(error, CannotCapture):
            raise RankLost(f"trying CUDA graphs failed on rank {group.rank}: {error}") from error
        logger.warning("decode steps are computed without CUDA graphs, which --enforce-eager does not try: %s", error)
        return None
    if any(group.exchange(b"" if difference <= tolerance else b"off")):  # only rank 0 has logits to compare
        logger.warning("decode steps are computed without CUDA graphs, whose logits are off by %f here", difference)
        return None
    logger.info("CUDA graphs for decode of up to %d requests, logits within %.2g", program.sizes[-1], difference)
    return program


@torch.inference_mode()
def _largest_difference(program: StaticDecode, decoder: LlamaDecoder, attention: Attention, most_tokens: int) -> float:
    """Return the largest difference of logits, over the largest logit, between each size with the most padding and the
    decoder; 0 on ranks without logits.

    The trial uses random contexts of up to most_tokens tokens.
    """
    pool, vocab_size = attention.pool, decoder.vocab_size
    num_blocks = min(pool.num_blocks - 1, max(program.sizes[-1], pool.layout.num_blocks_for(most_tokens)))
    most_tokens = min(most_tokens, num_blocks * pool.layout.block_size)
    differences = [0.0]
    try:
        for layer in pool.layout.layers:
            pool.try_values(layer, num_blocks)
        for smaller in (0, *program.sizes[:-1]):
            lengths = [most_tokens - 37 * row % most_tokens for row in range(smaller + 1)]
            batch = _decode_batch(lengths, num_blocks, vocab_size, pool)
            expected, plan = decoder(batch, attention), program.plan(batch)
            assert plan is not None, "decode steps without adapters fit"
            replayed = program.run(batch, plan, lambda: None)
            if expected is not None and replayed is not None:
                difference = (replayed.rows - expected).abs().max() / expected.abs().max()
                differences.append(float(difference.nan_to_num(torch.inf)))
    finally:
        for layer in pool.layout.layers:
            pool.clear(layer, num_blocks)
    return max(differences)


def _decode_batch(lengths: list[int], num_blocks: int, vocab_size: int, pool: PagedKVPool) -> ForwardBatch:
    """Return requests of these lengths, each with a last block of its own; their earlier blocks are other requests'
    last ones.
    """
    shares = []
    for row, length in enumerate(lengths):
        count = pool.layout.num_blocks_for(length)
        blocks = [(row + place) % num_blocks for place in reversed(range(count))]
        shares.append(Share([101 * row % vocab_size], length - 1, blocks, samples=True))
    return build_batch(shares, pool.layout.block_size, pool.device)


def cuda_graphs(
    decoder: LlamaDecoder,
    attention: Attention,
    num_blocks: int,
    max_model_len: int,
    group: RankGroup,
    *,
    exact: bool,
) -> StaticDecode | None:
    """Return a decode program of CUDA graphs on the pool's device, or None on all ranks, with the reason logged.

    It is None if the capture fails, if the logits differ too much, or if any rank's attention backend plans on the
    host. `exact`: logits must equal the decoder's to the bit; otherwise a tolerance applies. Requests own the first
    num_blocks blocks of the pool, and have up to max_model_len tokens. Raises RankLost if a rank fails in a common
    computation.
    """
    is_unfit = isinstance(attention, PortableAttention | TiledAttention)
    if any(group.exchange(b"unfit" if is_unfit else b"")):
        return None
    capture = CudaCapture(attention.pool.device)
    tolerance = 0.0 if exact else TOLERANCE if group.adds_alike else SUMS_TOLERANCE
    return checked_decode(decoder, attention, num_blocks, max_model_len, capture, group, tolerance)
