"""What tokens see, found out of the mask functions of transformers themselves; and what attention is asked for."""

import pytest
import torch
from transformers import AttentionInterface, masking_utils

from engine.transformers_backend.decoder import NAME, Sight, answering, sight_of
from serving_core.errors import ModelError


@pytest.mark.parametrize("window", [None, 1, 2, 13, 4096, 10**6])
def test_causal_masks_and_windows(window):
    assert sight_of(masking_utils.causal_mask_function, window) == Sight(None)
    if window is not None:
        assert sight_of(masking_utils.sliding_window_causal_mask_function(window), window) == Sight(window)


def test_a_window_that_the_config_does_not_name():
    for window in (None, 12, 14):
        with pytest.raises(ModelError, match="neither causal nor a sliding window"):
            sight_of(masking_utils.sliding_window_causal_mask_function(13), window)


@pytest.mark.parametrize(
    "mask",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(64),
        masking_utils.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64)),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, query, key: key % 2 == 0),
        masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, query, key: key < 3),
    ],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(ModelError, match="neither causal nor a sliding window"):
        sight_of(mask, 64)


class Layer(torch.nn.Module):
    layer_idx = 3


class Kept:
    """A step that keeps what it is asked for and gives the values of all key heads twice."""

    def attend(self, call):
        self.call = call
        return call.values.repeat_interleave(2, dim=1)


WINDOW = Sight(13)


def ask(module=None, mask=WINDOW, **arguments):
    """A layer of four heads asks for attention of five tokens; gives what the step was asked for, and its answer."""
    step, heads = Kept(), [torch.randn(1, num_heads, 5, 6) for num_heads in (4, 2, 2)]
    with answering(step):
        output, weights = AttentionInterface()[NAME](module or Layer(), *heads, mask, **arguments)
    assert weights is None
    assert torch.equal(output[0], heads[2][0].transpose(0, 1).repeat_interleave(2, dim=1))
    return step.call


def test_what_a_layer_asks_for():
    call = ask(scaling=0.3, dropout=0.0, sliding_window=13, softcap=2.0, s_aux=torch.ones(4), use_cache=False)
    assert (call.layer, call.scaling, call.window, call.softcap) == (3, 0.3, 13, 2.0)
    assert (call.queries.shape, call.keys.shape) == ((5, 4, 6), (5, 2, 6))
    assert torch.equal(call.sinks, torch.ones(4))
    assert (call.is_scored, ask().is_scored, ask().scaling) == (True, False, 6**-0.5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"alibi": torch.ones(4)}, "Layer asks attention for alibi, which is not supported"),
        ({"zeta": 1, "position_bias": 0.0}, "Layer asks attention for position_bias, which is not supported"),
        ({"dropout": 0.1}, "Layer asks attention for dropout, which is not supported"),
        ({"sliding_window": 12}, "Layer asks for a window of 12 under a mask of 13"),
        ({"mask": None}, "Layer asks for attention without a layer's number or a mask of its layer"),
        ({"module": torch.nn.Identity()}, "Identity asks for attention without a layer's number"),
    ],
)
def test_what_attention_does_not_know_is_refused(arguments, sentence):
    with pytest.raises(ModelError, match=sentence):
        ask(**arguments)
