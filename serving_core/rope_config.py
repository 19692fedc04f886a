"""How a model turns positions into rotations: the closed family of rotary embeddings we know. Torch-free."""

import math
from dataclasses import dataclass

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Rotary embedding as in RoFormer (arXiv 2104.09864)."""

    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by factor (arXiv 2306.15595)."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv 2309.00071). attention_factor multiplies cosines and sines."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """The frequency-dependent scaling of Llama 3.1 (arXiv 2407.21783)."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


Rope = DefaultRope | LinearRope | YarnRope | Llama3Rope


def read_rope(config: JsonFields, max_position_embeddings: int) -> Rope:
    """The rotary embedding that a config.json asks for, in the spelling of transformers 4 (rope_theta, rope_scaling)
    or 5 (rope_parameters). Raises ModelError for kinds we do not know."""
    rope = config.nested("rope_scaling") or config.nested("rope_parameters") or JsonFields({}, "rope_parameters")
    _refuse_unknown_shapes(config, rope)
    theta = rope.positive("rope_theta", config.positive("rope_theta", DEFAULT_THETA))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return DefaultRope(theta)
    if kind == "linear":
        return LinearRope(theta, rope.positive("factor"))
    if kind not in ("yarn", "llama3"):
        raise ModelError(f"rope type {kind!r} is not supported; supported are default, linear, yarn and llama3")
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    if kind == "yarn":
        return _read_yarn(rope, theta, original, max_position_embeddings)
    return _read_llama3(rope, theta, original)


def _refuse_unknown_shapes(config: JsonFields, rope: JsonFields) -> None:
    for fields in (config, rope):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("a partial_rotary_factor other than 1 is not supported; rotation covers the whole head")
    if "full_attention" in rope or "sliding_attention" in rope:
        raise ModelError("rope parameters that differ by layer type are not supported; all layers share one rope")


def _read_yarn(rope: JsonFields, theta: float, original: int, max_position_embeddings: int) -> YarnRope:
    factor = rope.positive("factor", max_position_embeddings / original)
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    attention_factor = _yarn_mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 0.0) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0) or 1.0,
        attention_factor=rope.positive("attention_factor", attention_factor),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_llama3(rope: JsonFields, theta: float, original: int) -> Llama3Rope:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor ({low})")
    return Llama3Rope(theta, rope.positive("factor"), original, low, high)
