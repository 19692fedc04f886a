"""Describe the supported rotary embeddings, and read them from a config.json. Torch-free."""

import math
from dataclasses import dataclass

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

DEFAULT_THETA = 10_000.0
LONGROPE = "longrope"
FULL, SLIDING = "full_attention", "sliding_attention"  # layer types


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


@dataclass(frozen=True, slots=True)
class FactorRope:
    """Rotary embedding with a factor that slows each pair: a GGUF file's form of Llama 3.1's parameters."""

    theta: float
    factors: tuple[float, ...]


Rope = DefaultRope | LinearRope | YarnRope | Llama3Rope | FactorRope


def rope_kind(config: JsonFields) -> str:
    """Return the name of the kind of rotary embedding in a config.json, such as yarn; default if it names none."""
    rope = _rope_fields(config)
    return rope.text("rope_type", rope.text("type", "default"))


def original_context(config: JsonFields, max_position_embeddings: int) -> int:
    """Return the context length, in tokens, of training, before it was extended.

    If config.json does not state it, this is `max_position_embeddings`.
    """
    of_rope = _rope_fields(config).integer("original_max_position_embeddings", max_position_embeddings)
    return config.integer("original_max_position_embeddings", of_rope)


def rotary_share(config: JsonFields) -> float:
    """Return the fraction of a head that is rotated, 1.0 if config.json does not state it."""
    return _rope_fields(config).number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))


def read_rope(
    config: JsonFields, max_position_embeddings: int, *, may_be_partial: bool = False, layer_type: str | None = None
) -> Rope:
    """Return the rotary embedding of a config.json, in the format of transformers 4 or 5.

    With `layer_type`, that of the layers of this type, where types differ. `may_be_partial`: a part of each head may
    stay unrotated. Raises ModelError for an unsupported kind or a missing setting.
    """
    if layer_type is not None:
        config = _of_layers(config, layer_type)
    rope = _rope_fields(config)
    _refuse_unknown_shapes(config, rope, may_be_partial)
    theta = rope.positive("rope_theta", config.positive("rope_theta", DEFAULT_THETA))
    kind = rope_kind(config)
    if kind == "default":
        return DefaultRope(theta)
    if kind == "linear":
        return LinearRope(theta, rope.positive("factor"))
    if kind == LONGROPE:
        return _read_factors(rope, theta, config.integer("head_dim") // 2)
    if kind not in ("yarn", "llama3"):
        raise ModelError(f"rope type {kind!r} is not supported; supported are default, linear, yarn and llama3")
    original = original_context(config, max_position_embeddings)
    if kind == "yarn":
        return _read_yarn(rope, theta, original, max_position_embeddings)
    return _read_llama3(rope, theta, original)


def _rope_fields(config: JsonFields) -> JsonFields:
    given = (config.nested(name) for name in ("rope_scaling", "rope_parameters"))
    return next((fields for fields in given if fields is not None and fields.names), JsonFields({}, "rope_parameters"))


def _of_layers(config: JsonFields, layer_type: str) -> JsonFields:
    """Return a Gemma 3 config.json with the settings of one layer type as those of all layers."""
    by_type = config.nested("rope_parameters") or JsonFields({}, "rope_parameters")
    scaling = config.raw("rope_scaling")
    if by_type.names and scaling is not None:
        raise ModelError("rope_parameters and rope_scaling together are not supported")
    if unknown := [name for name in by_type.names if name not in (FULL, SLIDING)]:
        raise by_type.unsupported(unknown[0])
    theta = config.raw("rope_theta") if layer_type == FULL else config.number("rope_local_base_freq", DEFAULT_THETA)
    given = by_type.raw(layer_type) or (scaling if layer_type == FULL else None)
    found = JsonFields({"rope_theta": theta, "rope_parameters": given}, f"config.json for {layer_type}")
    if rope_kind(found) not in ("default", "linear"):
        raise ModelError(f"rope type {rope_kind(found)!r} is not supported for layers of one type alone")
    return found


def _refuse_unknown_shapes(config: JsonFields, rope: JsonFields, may_be_partial: bool) -> None:
    for fields in (config, rope):
        if not may_be_partial and fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("a partial_rotary_factor other than 1 is not supported; rotation covers the whole head")
    if FULL in rope or SLIDING in rope:
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


def _read_factors(rope: JsonFields, theta: float, num_pairs: int) -> FactorRope:
    """Return a longrope whose factors are the same for short and long texts."""
    factors = rope.raw("long_factor")
    if rope.raw("short_factor") != factors or rope.number("attention_factor", 0.0) != 1.0:
        raise ModelError("a longrope that depends on how long a text is, is not supported")
    is_list = isinstance(factors, list) and len(factors) == num_pairs
    if not is_list or not all(type(factor) in (int, float) and 0 < factor < math.inf for factor in factors):
        raise rope.error("long_factor", f"a list of {num_pairs} numbers above 0")
    return FactorRope(theta, tuple(map(float, factors)))


def _read_llama3(rope: JsonFields, theta: float, original: int) -> Llama3Rope:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor ({low})")
    return Llama3Rope(theta, rope.positive("factor"), original, low, high)
