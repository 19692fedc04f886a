"""Where keys are gathered from, and how many at once; tests/gpu has the attention over them."""

import torch

from engine.attention import varlen
from engine.attention.varlen import _keys, _parts
from engine.forward_batch import build_batch
from serving_core.requests import Share


def test_slots_of_all_tokens_of_each_request():
    shares = [Share([1, 2], 4, [7, 2], True), Share([3], 0, [5], True), Share([4, 5, 6], 0, [1, 9], True)]
    slots, starts = _keys(build_batch(shares, 4, torch.device("cpu")), 4)
    assert slots.tolist() == [28, 29, 30, 31, 8, 9, 20, 4, 5, 6]  # block * 4 + position % 4
    assert (starts.tolist(), starts.dtype) == ([0, 6, 7, 10], torch.int32)


def test_requests_are_gathered_together_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(varlen, "GATHERED_TOKENS", 10)
    assert [*_parts([4, 6, 1, 30, 2, 8])] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert [*_parts([30])] == [(0, 1)]
