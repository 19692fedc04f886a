import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.ops.rope import RotaryEmbedding, inverse_frequencies, rotate
from serving_core.model_files.rope import DefaultRope, FactorRope, LinearRope, Llama3Rope, YarnRope
from tests.unit.engine.in_one_test import for_each

FACTORS = (1.0,) * 12 + (1.3, 2.7, 5.1, 7.9) + (8.0,) * 16
ROPES = {
    "default": (DefaultRope(1e4), {"rope_type": "default", "rope_theta": 1e4}),
    "default-large-theta": (DefaultRope(1e6), {"rope_type": "default", "rope_theta": 1e6}),
    "linear": (LinearRope(1e4, 3.0), {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "yarn": (
        YarnRope(1e4, 4.0, 2048, 32.0, 1.0, 1.25, True),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.25,
        },
    ),
    "yarn-not-truncated": (
        YarnRope(1e6, 8.0, 1024, 24.0, 2.0, 1.0, False),
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.0,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
    "llama3": (
        Llama3Rope(5e5, 8.0, 1024, 1.0, 4.0),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
    "factors": (
        FactorRope(5e5, FACTORS),
        {
            "rope_type": "longrope",
            "rope_theta": 5e5,
            "short_factor": list(FACTORS),
            "long_factor": list(FACTORS),
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.0,
        },
    ),
}
HEAD_DIM = 64


def reference_config(parameters):
    return transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=8192, rope_parameters=dict(parameters)
    )


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_have_the_bits_of_transformers(name):
    rope, parameters = ROPES[name]
    expected = LlamaRotaryEmbedding(reference_config(parameters)).inv_freq
    assert torch.equal(inverse_frequencies(rope, HEAD_DIM), expected)


@for_each(name=ROPES, dtype=[torch.float32, torch.bfloat16])
def test_rotation_equals_transformers_at_far_positions(name, dtype):
    rope, parameters = ROPES[name]
    positions = torch.tensor([0, 1, 17, 1000, 8191, 100_000])
    heads = torch.randn(len(positions), 3, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)

    rotated = rotate(heads, *RotaryEmbedding(rope, HEAD_DIM, torch.device("cpu")).tables(positions, dtype))

    cos, sin = LlamaRotaryEmbedding(reference_config(parameters))(heads, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(heads.unsqueeze(0), heads.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    tolerance = 1e-6 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(rotated, expected[0], rtol=0, atol=tolerance)


def test_by_hand():
    # One pair, frequency 1: position 2 turns (1, 0) by 2 radians.
    rotary = RotaryEmbedding(DefaultRope(1e4), 2, torch.device("cpu"))
    rotated = rotate(torch.tensor([[[1.0, 0.0]]]), *rotary.tables(torch.tensor([2]), torch.float32))
    torch.testing.assert_close(rotated, torch.tensor([[[-0.4161468, 0.9092974]]]))
