"""Whether a device's attention is taken depends on what it gives, here given by hand."""

import logging

import pytest
import torch

from engine.attention import varlen
from engine.attention.backends import _on_cuda
from engine.attention.paged import PortableAttention
from engine.cache.kv_pool import PagedKVPool
from serving_core.layout import KVLayout
from tests.simulated_cuda.attention import flash_attention


class Candidate(PortableAttention):
    """The portable one under another name, which adds to its outputs."""

    def __init__(self, pool, score_scale):
        super().__init__(pool, 4, score_scale)

    def attend(self, query, layer, plan):
        return super().attend(query, layer, plan) + self.added


class Lacking(Candidate):
    """As a torch that does not know the arguments."""

    def attend(self, query, layer, plan):
        raise TypeError("varlen_attn() got an unexpected keyword argument 'block_table'")


def portable_of(block_size):
    layout = KVLayout.uniform(1, 2, 8, block_size, "bfloat16")
    return PortableAttention(PagedKVPool(layout, 6, torch.device("cpu")), 4)


@pytest.mark.parametrize(
    ("kind", "added", "is_taken"),
    [(Candidate, 0.0, True), (Candidate, 0.2, False), (Candidate, torch.nan, False), (Lacking, 0.0, False)],
)
def test_what_is_off_or_not_a_number_or_not_there_is_not_taken(monkeypatch, kind, added, is_taken):
    monkeypatch.setattr(kind, "added", added, raising=False)
    monkeypatch.setattr("engine.attention.varlen.VarlenAttention", kind)
    portable = portable_of(256)
    chosen = _on_cuda(portable, 4)
    assert isinstance(chosen, kind) == is_taken
    assert is_taken or chosen is portable
    assert not portable.pool.keys(0).any()


def flash_attention_2(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """What FlashAttention 2 takes of varlen_attn's arguments with pages, by its own checks (flash_api.cpp), and what it
    gives, worked out request by request: causal attention, aligned at the end."""
    lengths, table = options["seqused_k"], options["block_table"]
    num_requests = len(cu_seq_q) - 1
    for starts in (cu_seq_q, cu_seq_k):
        assert starts is not None, "both cumulative lengths are set, or neither is"
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert starts.shape == (num_requests + 1,)
    assert lengths.dtype == table.dtype == torch.int32
    assert lengths.shape == (num_requests,)
    assert table.stride(-1) == 1
    assert key.shape[1] % 256 == 0
    assert query.shape[1] % key.shape[2] == 0
    assert options["enable_gqa"]
    assert int(lengths.max()) <= max_k
    assert int(cu_seq_q.diff().max()) <= max_q
    assert options["window_size"] == (-1, 0)
    assert options["num_splits"] == 1
    left, right = options["window_size"]
    attended, *_ = flash_attention(
        *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, True, False),
        scale=options["scale"],
        window_size_left=left,
        window_size_right=right,
        seqused_k=lengths,
        block_table=table,
    )
    return attended


def test_it_is_asked_for_what_flash_attention_2_takes(monkeypatch, caplog):
    monkeypatch.setattr(varlen, "varlen_attn", flash_attention_2)
    assert isinstance(_on_cuda(portable_of(256), 4), varlen.VarlenAttention), caplog.text


def test_other_sizes_of_blocks_are_not_tried_and_a_line_says_which_one_would_do(monkeypatch, caplog):
    monkeypatch.setattr(varlen, "varlen_attn", None)
    portable = portable_of(16)
    with caplog.at_level(logging.INFO):
        assert _on_cuda(portable, 4) is portable
    assert "--block-size 256" in caplog.text
