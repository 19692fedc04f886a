"""Attention over latents, against that over the keys and values that transformers' own layer makes of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from engine.transformers_backend.decoder import NAME, expansion_of, keep_latents
from serving_core.errors import ModelError


def layer_of(num_heads, plain, rotated, values, latent):
    torch.manual_seed(num_heads + plain + rotated + values + latent)
    sizes = {"qk_nope_head_dim": plain, "qk_rope_head_dim": rotated, "v_head_dim": values, "kv_lora_rank": latent}
    config = DeepseekV3Config(hidden_size=8, num_attention_heads=num_heads, num_key_value_heads=num_heads, **sizes)
    return DeepseekV3Attention(config, 0).double()


sizes = st.integers(1, 9)


@given(num_heads=st.integers(1, 4), plain=sizes, rotated=sizes.map(lambda n: 2 * n), values=sizes, latent=sizes)
@torch.no_grad()
def test_what_is_attended_is_what_keys_and_values_give(num_heads, plain, rotated, values, latent):
    num_tokens = 5
    layer = layer_of(num_heads, plain, rotated, values, latent)
    queries = torch.randn(num_heads, num_tokens, plain + rotated).double()
    vectors = torch.randn(1, 1, num_tokens, latent + rotated).double()
    keys, made = layer.expand_kv(vectors[..., :latent], vectors[..., latent:])
    expected = functional.scaled_dot_product_attention(queries, keys[0], made[0], scale=1.0)

    expansion = expansion_of(layer)
    assert expansion is None
    keep_latents(layer, NAME)
    expansion = expansion_of(layer)
    absorbed = expansion.absorbed(queries.transpose(0, 1)).transpose(0, 1)
    attended = functional.scaled_dot_product_attention(absorbed, vectors[0], vectors[0], scale=1.0)
    found = expansion.expanded(attended.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(found, expected)
    last = slice(num_heads - 1, num_heads)
    assert torch.equal(expansion.of(last).expanded(attended[last].transpose(0, 1))[:, 0], found[-1])


def test_any_other_attention_is_asked_for_keys_and_values():
    layer = layer_of(2, 3, 4, 5, 6)
    given = torch.randn(1, 1, 7, 6).double(), torch.randn(1, 1, 7, 4).double()
    expected = layer.expand_kv(*given)
    keep_latents(layer, NAME)
    layer.config._attn_implementation = "eager"
    assert all(map(torch.equal, layer.expand_kv(*given), expected))
    layer.config._attn_implementation = NAME
    keys, values = layer.expand_kv(*given)
    assert (keys.shape, values.shape) == ((1, 1, 7, 10), (1, 1, 7, 0))


def test_layers_that_are_not_known_to_have_latents():
    with pytest.raises(ModelError, match="latent KV as Linear has it is not supported"):
        keep_latents(torch.nn.Linear(1, 1), NAME)
