"""Find out what the bits of an engine's outputs depend on beside the model.

These are facts about kernels, ranks and the machine; and, with --batch-invariant, a trial of the promise on the device,
with the very layers that will compute: one prompt at once, in chunks and steps, and beside other requests must give
equal bits.
"""

import hashlib
import logging
from collections.abc import Mapping
from importlib.metadata import version
from itertools import accumulate, product
from typing import Final

import torch

from engine.attention.backends import batch_invariant_attentions
from engine.attention.native import NativeAttention
from engine.attention.paged import Attention
from engine.attention.tiled import TILE_KEYS
from engine.fake import FakeModel
from engine.forward_batch import build_batch
from engine.model.llama import LlamaDecoder
from engine.native import library
from engine.parallel import RankGroup
from serving_core.process.extras import TRITON, is_installed
from serving_core.requests import Share

logger = logging.getLogger(__name__)

COUNTS: Final = "num_"  # torch's facts of cores and sockets, which the number of threads reflects
NOTHING_TO_KERNELS: Final = (  # keys of an engine's description that do not affect compiled kernels
    "threads",
    "program",
    "pp_size",
    "sequence_parallel_min_tokens",
    "layers_offloaded",
)

PROMPTS: Final = ((0, TILE_KEYS + 34), (1100, 40))  # tokens before and tokens: the second attends to many keys
CUT_AT: Final = (16, 116)
# Decode positions in the first prompt, on both sides of the second tile's first key
STEPS_BEFORE_END: Final = range(32, 36)
NUM_WANTED: Final = 40  # rows at the end with logits
MOST_OTHERS: Final = 6
IN_PARTS: Final = "in chunks and steps"
BESIDE_OTHERS: Final = "beside others"


def numerics_facts(description: Mapping[str, str], device: torch.device, *, kernels_alone: bool) -> dict[str, str]:
    """Return the facts, as strings by name, that decide the bits of an engine's outputs beside the model's fingerprint.

    Engines with equal fingerprint and facts compute equal bits for equal steps; the inverse is not guaranteed.
    `description` is the engine's own. `kernels_alone` says that compiled kernels compute every sum: then the number of
    threads, stages, tokens divided over two ranks and decode programs do not matter, and of the CPU only the
    instruction set does.
    """
    left_out = NOTHING_TO_KERNELS if kernels_alone else ()
    numerics = {key: value for key, value in description.items() if key not in left_out} | {"torch": torch.__version__}
    if device.type == "cpu":
        numerics |= {"cpu": _cpu(instructions_alone=kernels_alone), "kernels": _kernels()}
    elif is_installed(TRITON):  # Triton kernels are taken after a trial: other versions may choose other kernels
        numerics |= {TRITON: version(TRITON)}
    return numerics


def _cpu(*, instructions_alone: bool) -> str:
    """Return torch's description of the CPU, as words."""
    known = {key: value for key, value in torch.cpu.get_capabilities().items() if not key.startswith(COUNTS)}
    words = [key for key, value in known.items() if value is True]
    if not instructions_alone:
        words += [f"{key}={value}".replace(" ", "-") for key, value in known.items() if not isinstance(value, bool)]
    return " ".join(sorted(words))


def _kernels() -> str:
    """Return the usable kernel variants and the compiled libraries' identity: another compiler may add in another
    order.
    """
    path = library.library_path()
    digest = "none" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return " ".join((*library.wanted_variants(), digest))


def computes_by_kernels(model: object, attention: Attention, of_stage: RankGroup) -> bool:
    """Return whether batch-invariant compiled kernels compute every sum of the model on this rank.

    `of_stage` are the ranks that compute the same layers. True for the fake model; False with a quantized KV pool.
    """
    if isinstance(model, FakeModel):
        return True
    if not isinstance(model, LlamaDecoder) or attention.pool.layout.is_quantized or not of_stage.adds_alike:
        return False
    return isinstance(attention, NativeAttention) and model.is_batch_invariant(attention.pool.compute_dtype)


def make_batch_invariant(
    model: LlamaDecoder, attention: Attention, num_heads: int, max_model_len: int, group: RankGroup
) -> tuple[Attention, bool]:
    """Make a loaded decoder batch-invariant; return the fastest attention that passes the trial, and True.

    `num_heads` is this rank's query heads; the trial uses at most max_model_len tokens. If no attention passes, logs
    the differences of each and returns the last one tried, and False. Call on all ranks, before the pool holds data.
    """
    pool = attention.pool
    model.make_batch_invariant(pool.compute_dtype, pool.device)
    tried = attention
    for tried in batch_invariant_attentions(attention, num_heads):
        if pool.layout.is_quantized:
            break
        differing = differing_histories(model, tried, model.vocab_size, max_model_len)
        told = {data.decode() for data in group.exchange(" and ".join(differing).encode()) if data}
        if not told:
            return tried, True
        logger.warning("--batch-invariant: with %s attention, bits differ %s", tried.name, " and ".join(told))
    return tried, False


@torch.inference_mode()
def differing_histories(decoder: LlamaDecoder, attention: Attention, vocab_size: int, max_model_len: int) -> list[str]:
    """Try a prompt in chunks and steps, and beside others; return the names of those in which its bits differ.

    The bits are those of its keys, values and logits, compared with the prompt computed alone and at once; an empty
    list means batch-invariant here. Tries the decoder alone and each adapter, with token ids below vocab_size and at
    most max_model_len tokens. Call on all ranks, each with its own keys and values, before the pool holds data; the
    pool is empty again afterwards.
    """
    layout, num_blocks = attention.pool.layout, attention.pool.num_blocks
    most_tokens = min(max_model_len, -(-num_blocks // 2) * layout.block_size)
    found = set()
    for (start, num_tokens), adapter in product(PROMPTS, ("", *decoder.adapters.names)):
        start, num_tokens = min(start, max(0, most_tokens - num_tokens)), min(num_tokens, most_tokens)
        trial = _Trial(decoder, attention, vocab_size, start, num_tokens, adapter)
        try:
            alone = trial.bits(in_parts=False, beside_others=False)
            tried = {IN_PARTS: trial.bits(in_parts=True, beside_others=False)}
            tried[BESIDE_OTHERS] = trial.bits(in_parts=False, beside_others=True)
        finally:
            trial.clear()
        found |= {name for name, bits in tried.items() if not all(map(torch.equal, bits, alone))}
    return sorted(found, reverse=True)


class _Trial:
    """The end of a prompt behind random keys and values, and other requests of the model alone, in a temporary pool."""

    def __init__(
        self, decoder: LlamaDecoder, attention: Attention, vocab_size: int, start: int, num_tokens: int, adapter: str
    ) -> None:
        layout = attention.pool.layout
        self._decoder, self._attention = decoder, attention
        self._layers = decoder.some_layers
        self._vocab_size = vocab_size
        self._adapter = adapter
        self._start, self._token_ids = start, self._ids(num_tokens, seed=1)
        self._blocks = range(layout.num_blocks_for(start + num_tokens))
        self._others = self._make_others(range(self._blocks.stop, attention.pool.num_blocks), num_tokens)
        if start:
            for cache in self._caches():
                cache[: self._blocks.stop].normal_()

    def bits(self, *, in_parts: bool, beside_others: bool) -> list[torch.Tensor]:
        """Return the bytes of the prompt's keys and values, and on rank 0 of the logits of its last tokens."""
        length, pool, logits = len(self._token_ids), self._attention.pool, []
        cuts = {*CUT_AT, *(length - before for before in STEPS_BEFORE_END)} if in_parts else set()
        ends = [*sorted(at for at in cuts if 0 < at < length), length]
        for first, end in zip([0, *ends], ends, strict=False):
            token_ids, before = self._token_ids[first:end], self._start + first
            share = Share(token_ids, before, self._blocks, samples=True, adapter=self._adapter)
            shares = [*self._others, share] if beside_others else [share]
            batch = build_batch(shares, pool.layout.block_size, pool.device)
            num_wanted = end - max(first, min(end, length - NUM_WANTED))
            wanted = torch.arange(len(batch.token_ids) - num_wanted, len(batch.token_ids), device=pool.device)
            logits.append(self._decoder(batch.wanting(wanted), self._attention, layers=self._layers))
        results = [cache[: self._blocks.stop].clone() for cache in self._caches()]
        if ours := [rows for rows in logits if rows is not None]:
            results.append(torch.cat(ours))
        return [result.view(torch.uint8) for result in results]

    def clear(self) -> None:
        """Zero everything that was written."""
        last = max((share.block_ids[-1] for share in self._others), default=self._blocks[-1])
        for cache in self._caches():
            cache[: last + 1] = 0

    def _caches(self) -> list[torch.Tensor]:
        pool, layers = self._attention.pool, [layer.self_attn.layer for layer in self._layers]
        return [cache for layer in layers for cache in (pool.keys(layer), pool.values(layer))]

    def _make_others(self, blocks: range, most_tokens: int) -> list[Share]:
        """Return prefill and decode shares in these blocks, each with some blocks of its own; none without blocks."""
        block_size, others = self._attention.pool.layout.block_size, []
        counts = [1 + 23 * index // block_size for index in range(MOST_OTHERS)]
        for index, end in enumerate(accumulate(counts)):
            if end > len(blocks):
                break
            length = min(1 + 23 * index, most_tokens)
            first = 0 if index % 2 else length - 1
            own = blocks[end - counts[index] : end]
            others.append(Share(self._ids(length, seed=2 + index)[first:], first, own, samples=True))
        return others

    def _ids(self, count: int, seed: int) -> list[int]:
        return [(seed * 31 + at * (at + seed)) % self._vocab_size for at in range(count)]
