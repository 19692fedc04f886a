"""What FlashAttention 2 takes and gives, with blocks and without: one request after the other, and in float64, so that
the bits of a row depend on no other, as with the kernel when it is told not to split keys."""

import itertools

import torch

PAGE_TOKENS = 256


def flash_attention(
    query,
    keys,
    values,
    query_starts,
    key_starts,
    longest_query,
    longest_context,
    dropout,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """Of queries [T, H, D] against keys and values [blocks, PAGE_TOKENS, K, D], or without block_table [keys, K, D].
    Raises RuntimeError for what the kernel refuses."""
    check(query, keys, values, query_starts, key_starts, seqused_k, block_table)
    attended = torch.empty_like(query)
    assert window_size_right == 0, "of what is seen to the right nothing is simulated"
    left = None if window_size_left is None or window_size_left < 0 else window_size_left
    bounds = query_starts.tolist()
    assert longest_query >= max(end - start for start, end in itertools.pairwise(bounds))
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        if block_table is None:
            first, length = int(key_starts[row]), int(key_starts[row + 1] - key_starts[row])
            found = (cache[first : first + length] for cache in (keys, values))
        else:
            length = int(seqused_k[row])
            blocks = block_table[row, : -(-length // keys.shape[1])].long()
            found = (cache[blocks].flatten(0, 1)[:length] for cache in (keys, values))
        assert longest_context >= length
        attended[start:end] = attend(
            query[start:end].double(),
            *(each.double() for each in found),
            left,
            query.shape[-1] ** -0.5 if scale is None else scale,
        ).to(query.dtype)
    nothing = torch.empty(0, dtype=torch.uint64)
    return attended, torch.empty(query.shape[1], query.shape[0]), nothing, nothing, nothing


def attend(query, keys, values, left, scale):
    """[q, H, D] of the last q of the k tokens of keys and values [k, K, D]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    at = torch.arange(len(keys) - len(query), len(keys))[:, None]
    places = torch.arange(len(keys))[None]
    hidden = places > at
    if left is not None:
        hidden |= places < at - left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def check(query, keys, values, query_starts, key_starts, seqused_k, block_table):
    refuse(query.dtype not in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    refuse(not query.dtype == keys.dtype == values.dtype, "query and key must have the same dtype")
    refuse(query.shape[-1] > 256 or query.shape[-1] % 8, "head dimension must be a multiple of 8 and at most 256")
    refuse(query.shape[1] % keys.shape[-2], "heads of keys must divide those of queries")
    refuse(key_starts is None, "cumulative_sequence_length_k must be there")
    for name, tensor in (("q", query_starts), ("k", key_starts), ("used", seqused_k), ("block_table", block_table)):
        refuse(tensor is not None and tensor.dtype != torch.int32, f"{name} must have dtype int32")
    refuse(any(each.stride(-1) != 1 for each in (query, keys, values)), "last dimensions must be contiguous")
    if block_table is None:
        refuse(keys.dim() != 3 or len(key_starts) != len(query_starts), "keys must be of as many requests as queries")
        refuse(int(key_starts[-1]) != len(keys), "the last request's keys must be the last ones")
        return
    refuse(block_table.stride(-1) != 1, "block_table must have contiguous last dimension")
    refuse(keys.shape[1] % PAGE_TOKENS, f"Paged KV cache block size must be divisible by {PAGE_TOKENS}")


def refuse(condition, why):
    if condition:
        raise RuntimeError(why)
