"""What the promise of --batch-invariant is tried out with at the start, and what becomes of an engine that fails."""

import logging

import pytest
import torch

import engine.numerics
from engine.attention.tiled import TiledAttention
from engine.build import build_engine
from engine.native.library import ENVIRONMENT, OFF
from engine.numerics import BESIDE_OTHERS, IN_PARTS, differing_histories
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.tiny_models import VOCAB_SIZE, write_tiny_model


@pytest.fixture(scope="module", autouse=True)
def portable():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, OFF)
        yield


@pytest.fixture(scope="module")
def folder(written):
    config = {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1, "num_hidden_layers": 2}
    return written(write_tiny_model, "qwen2", seed=3, **config)


@pytest.fixture(scope="module")
def loaded(folder):
    """Return an engine whose pool every test leaves empty."""
    return load(folder)


def load(folder, **fields):
    fields = {"num_kv_blocks": 64, "block_size": 16, "batch_invariant": True, **fields}
    return build_engine(EngineSettings(model=str(folder), device="cpu", dtype="float32", **fields))


def differing(engine, attention):
    return differing_histories(engine.model, attention, VOCAB_SIZE, engine.max_model_len)


class Nudged(TiledAttention):
    """Adds a last bit to the rows of some batches."""

    def __init__(self, pool, num_heads, concerns):
        super().__init__(pool, num_heads)
        self._concerns = concerns

    def plan(self, batch, window):
        return self._concerns(batch), super().plan(batch, window)

    def attend(self, query, layer, plan):
        is_concerned, groups = plan
        attended = super().attend(query, layer, groups)
        return torch.nextafter(attended, torch.tensor(torch.inf)) if is_concerned else attended


@pytest.mark.parametrize(
    ("concerns", "found"),
    [
        (lambda batch: False, []),
        (lambda batch: True, []),
        (lambda batch: batch.longest_query == 1, [IN_PARTS]),
        (lambda batch: batch.longest_query == 16, [IN_PARTS]),
        (lambda batch: len(batch.kv_lengths) > 1, [BESIDE_OTHERS]),
        (lambda batch: len(batch.token_ids) == 290, [IN_PARTS, BESIDE_OTHERS]),
    ],
)
def test_a_last_bit_in_some_batches_is_noticed_and_the_pool_left_empty(loaded, concerns, found):
    attention = Nudged(loaded.pool, loaded.config.num_heads, concerns)
    assert differing(loaded, attention) == found
    assert not any(loaded.pool.keys(layer).any() or loaded.pool.values(layer).any() for layer in loaded.layout.layers)


ENDS = [(1, 16, 0), (2, 16, 0), (3, 1, 0), (64, 16, 20), (9, 256, 0)]


@pytest.mark.parametrize("sizes", few(ENDS, (1, 16, 0), (3, 1, 0), (64, 16, 20)))
def test_pools_and_models_of_all_sizes_are_tried(folder, sizes):
    num_blocks, block_size, max_model_len = sizes
    engine = load(folder, num_kv_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
    assert engine.is_batch_invariant
    assert isinstance(engine.attention, TiledAttention)


def test_a_model_of_one_layer_is_tried(tmp_path):
    assert load(write_tiny_model(tmp_path, num_hidden_layers=1)).is_batch_invariant


def nudged_steps(attention, num_heads):
    return Nudged(attention.pool, num_heads, lambda batch: batch.longest_query == 1)


def test_the_first_backend_that_keeps_bits_is_taken_and_a_line_names_what_others_do_not(folder, monkeypatch, caplog):
    def backends(attention, num_heads):
        yield nudged_steps(attention, num_heads)
        yield TiledAttention(attention.pool, num_heads)

    monkeypatch.setattr(engine.numerics, "batch_invariant_attentions", backends)
    with caplog.at_level(logging.WARNING, logger="engine.numerics"):
        kept = load(folder)
    assert type(kept.attention) is TiledAttention
    assert kept.numerics_facts["is_batch_invariant"] == "yes"
    assert caplog.messages[-1] == f"--batch-invariant: with tiled attention, bits differ {IN_PARTS}"


def test_where_none_keeps_bits_none_are_promised(folder, loaded, monkeypatch):
    monkeypatch.setattr(engine.numerics, "batch_invariant_attentions", lambda *given: [nudged_steps(*given)])
    nudged = load(folder)
    assert not nudged.is_batch_invariant
    assert nudged.numerics_facts["is_batch_invariant"] == "no"
    assert nudged.numerics != loaded.numerics


def test_a_backend_that_is_told_apart_by_long_contexts_alone_is_noticed(folder):
    engine = load(folder, num_kv_blocks=200)

    def is_far_step(batch):
        return batch.longest_query == 1 and batch.longest_context > 900

    far = Nudged(engine.pool, engine.config.num_heads, is_far_step)
    assert differing(engine, far) == [IN_PARTS]


def test_all_that_a_step_makes_is_made_on_the_device_of_the_pool(folder):
    """Else it would be on the default device, here one that computes nothing."""
    engine = load(folder)
    with torch.device("meta"):
        engine.model.make_batch_invariant(torch.float32, engine.pool.device)
        assert differing(engine, TiledAttention(engine.pool, engine.config.num_heads)) == []
