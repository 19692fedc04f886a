"""Whether a device's attention is taken depends on what it gives, here given by hand."""

import pytest
import torch

from engine.attention.backends import _varlen_or
from engine.attention.paged import PortableAttention
from engine.cache.kv_pool import PagedKVPool
from serving_core.layout import KVLayout


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


@pytest.mark.parametrize(
    ("kind", "added", "is_taken"),
    [(Candidate, 0.0, True), (Candidate, 0.2, False), (Candidate, torch.nan, False), (Lacking, 0.0, False)],
)
def test_what_is_off_or_not_a_number_or_not_there_is_not_taken(monkeypatch, kind, added, is_taken):
    monkeypatch.setattr(kind, "added", added, raising=False)
    monkeypatch.setattr("engine.attention.varlen.VarlenAttention", kind)
    portable = PortableAttention(PagedKVPool(KVLayout.uniform(1, 2, 8, 4, "bfloat16"), 6, torch.device("cpu")), 4)
    chosen = _varlen_or(portable, 4)
    assert isinstance(chosen, kind) == is_taken
    assert is_taken or chosen is portable
    assert not portable.pool.keys(0).any()
