"""Decide which quantized checkpoints are supported, from quantization_config of config.json, and together with
--quantization.
Torch-free.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from serving_core.errors import ModelError, SettingsError
from serving_core.json_fields import JsonFields

WHOLE: Final = -1  # a group_size: one group of all inputs


MXFP4: Final = "mxfp4"  # of gpt-oss: experts stacked in one tensor
BITSANDBYTES: Final = "bitsandbytes"
FP8: Final = "F8_E4M3"  # the name in safetensors files
FP8_SCALES: Final = ("weight_scale", "weight_scale_inv")  # names of a weight's factors
MOST_BLOCK: Final = 2**16
MXFP4_GROUP: Final = 32  # inputs that share a scale
NVFP4_GROUP: Final = 16
PACKED: Final = ("weight_packed", "qweight")  # names of a weight's numbers where they are not `weight`
BESIDE: Final = frozenset(  # names of the tensors beside a weight's numbers
    (
        *FP8_SCALES,
        *("weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("input_scale", "input_global_scale", "activation_scale", "k_scale", "v_scale"),
        *("qzeros", "scales", "g_idx"),
        *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4"),
        *("SCB", "weight_format"),
    )
)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Describe the format in which a checkpoint stores quantized weights."""

    method: str  # gptq, awq, w4a16, w8a16, w8a8, fp8, nvfp4, mxfp4-pack, bitsandbytes or mxfp4
    bits: int
    group_size: int  # inputs that share a scale; WHOLE: all
    zeros_start_at_one: bool = False  # a stored zero of 0 means 1, as in GPTQ's first format
    block: tuple[int, int] | None = None  # outputs and inputs that share an fp8 scale; None: whole outputs, or all

    become_floats: bool = False  # when they are loaded: no kernel computes with the stored numbers


def weight_name(name: str) -> str | None:
    """Return the name of the weight whose numbers a tensor of a quantized checkpoint holds.

    Tensors that are stored as floats keep their name. Returns None for a tensor beside a weight's numbers.
    """
    module, _, kind = name.rpartition(".")
    if kind in BESIDE:
        return None
    return f"{module}.weight" if kind in PACKED else name


def check_quantization(quantization: str, stored: StoredQuantization | None) -> None:
    """Raise SettingsError if --quantization asks to quantize weights that are quantized, and stay as they are stored.

    `stored` is their stored format; None for floats.
    """
    if stored is not None and not stored.become_floats and quantization != "none":
        raise SettingsError(
            f"--quantization {quantization}: the weights are stored as {quantization_name('none', stored)} already"
        )


def quantization_name(quantization: str, stored: StoredQuantization | None) -> str:
    """Return the weights' quantization in a word: `quantization`, a value of --quantization, if it is set.

    Else the stored format, such as gptq-int4.
    """
    if stored is None or quantization != "none":
        return quantization
    return f"{stored.method}-int{stored.bits}" if stored.method in ("gptq", "awq") else stored.method


def read_stored_quantization(config: JsonFields) -> StoredQuantization | None:
    """Return the stored format that config.json states; None for weights stored as floats.

    Raises ModelError, which names the setting, for an unsupported format.
    """
    fields = config.nested("quantization_config")
    if fields is None:
        return None
    is_bitsandbytes = fields.raw("load_in_4bit") or fields.raw("load_in_8bit")  # which older files do not name
    method = fields.text("quant_method", BITSANDBYTES if is_bitsandbytes else "")
    if method not in _READERS:
        raise _unsupported("quant_method", method, ", ".join(_READERS))
    return _READERS[method](fields)


def read_dequantized(config: JsonFields) -> StoredQuantization | None:
    """Return the stored format of weights that become floats whatever it is; None for weights stored as floats.

    Raises ModelError, which names the setting, for an unsupported format.
    """
    fields = config.nested("quantization_config")
    if fields is not None and fields.raw("quant_method") == MXFP4 and config.raw("model_type") == "gpt_oss":
        return StoredQuantization(MXFP4, 4, MXFP4_GROUP, become_floats=True)
    stored = read_stored_quantization(config)
    return None if stored is None else replace(stored, become_floats=True)


def _gptq(fields: JsonFields) -> StoredQuantization:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise _unsupported("bits", bits, "4, 8")
    stored_as = fields.renamed({"checkpoint_format": ("format",)}).text("checkpoint_format", "gptq").lower()
    if stored_as not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", stored_as, "gptq, gptq_v2")
    if fields.raw("dynamic"):
        raise ModelError("a quantization_config with dynamic settings for some modules is not supported")
    return StoredQuantization("gptq", bits, _group_size(fields, "group_size"), stored_as == "gptq")


def _awq(fields: JsonFields) -> StoredQuantization:
    bits = fields.integer("bits" if "bits" in fields else "w_bit")
    if bits != 4:
        raise _unsupported("bits", bits, "4")
    version = fields.renamed({"version": ("format",)}).text("version", "gemm").lower()
    if version != "gemm":
        raise _unsupported("version", version, "gemm")
    if not fields.boolean("zero_point", True):
        raise _unsupported("zero_point", False, "true")
    name = "group_size" if "group_size" in fields else "q_group_size"
    return StoredQuantization("awq", bits, _group_size(fields, name))


def _fp8(fields: JsonFields) -> StoredQuantization:
    of_scales = ("activation_scheme", "weight_block_size", "scale_fmt")
    _check_names(fields, ("quant_method", "fmt", "expert_dtype", "dequantize", *of_scales, *_KEPT))
    for name, value in (("fmt", "e4m3"), ("scale_fmt", "float"), ("expert_dtype", "fp8")):
        _check(fields, name, (value,))
    return StoredQuantization("fp8", 8, WHOLE, block=_block(fields, "weight_block_size"), become_floats=True)


def _compressed_tensors(fields: JsonFields) -> StoredQuantization:
    _check_names(fields, ("quant_method", "format", "quantization_status", "config_groups", "sparsity_config", *_KEPT))
    _check(fields, "quantization_status", ("compressed",))
    if (sparsity := fields.nested("sparsity_config")) is not None:
        _check(sparsity, "format", ("dense",))
    groups = fields.nested("config_groups")
    if groups is None or len(groups.names) != 1:
        raise fields.error("config_groups", "an object of one group")
    group = groups.nested(groups.names[0])
    weights = None if group is None else group.nested("weights")
    if group is None or weights is None:
        raise groups.error(groups.names[0], "an object with weights")
    _check_names(group, ("targets", "format", "weights", "input_activations"))
    form = fields.text("format", "")
    if form not in _COMPRESSED:
        raise _unsupported("format", form, ", ".join(_COMPRESSED))
    return _COMPRESSED[form](group, weights)


def _int_quantized(group: JsonFields, weights: JsonFields) -> StoredQuantization:
    inputs = group.nested("input_activations")
    if inputs is None:
        _check_scheme(weights, num_bits=(8,), type=("int",), strategy=("channel", "group"), dynamic=(False,))
        return StoredQuantization("w8a16", 8, _scheme_group(weights))
    _check_scheme(weights, num_bits=(8,), type=("int",), symmetric=(True,), strategy=("channel",), dynamic=(False,))
    _check_scheme(inputs, num_bits=(8,), type=("int",), symmetric=(True,), strategy=("token",), dynamic=(True,))
    return StoredQuantization("w8a8", 8, WHOLE)


def _pack_quantized(group: JsonFields, weights: JsonFields) -> StoredQuantization:
    _check_scheme(weights, num_bits=(4, 8), type=("int",), strategy=("channel", "group"), dynamic=(False,))
    if group.nested("input_activations") is not None:
        raise group.unsupported("input_activations")
    bits = weights.integer("num_bits")
    return StoredQuantization(f"w{bits}a16", bits, _scheme_group(weights))


def _float_quantized(_: JsonFields, weights: JsonFields) -> StoredQuantization:
    strategies = ("tensor", "channel", "block")
    _check_scheme(weights, num_bits=(8,), type=("float",), symmetric=(True,), strategy=strategies, dynamic=(False,))
    block = _block(weights, "block_structure") if weights.raw("strategy") == "block" else None
    return StoredQuantization("fp8", 8, WHOLE, block=block, become_floats=True)


def _nvfp4(_: JsonFields, weights: JsonFields) -> StoredQuantization:
    _check_scheme(weights, num_bits=(4,), type=("float",), strategy=("tensor_group",), group_size=(NVFP4_GROUP,))
    return StoredQuantization("nvfp4", 4, NVFP4_GROUP, become_floats=True)


def _mxfp4(_: JsonFields, weights: JsonFields) -> StoredQuantization:
    _check_scheme(weights, num_bits=(4,), type=("float",), strategy=("group",), group_size=(MXFP4_GROUP,))
    return StoredQuantization("mxfp4-pack", 4, MXFP4_GROUP, become_floats=True)


def _scheme_group(weights: JsonFields) -> int:
    return _group_size(weights, "group_size") if weights.raw("strategy") == "group" else WHOLE


def _modelopt(fields: JsonFields) -> StoredQuantization:
    algorithm = fields.text("quant_algo", "")
    if algorithm not in ("NVFP4", "FP8"):
        raise _unsupported("quant_algo", algorithm, "NVFP4, FP8")
    if algorithm == "FP8":
        return StoredQuantization("fp8", 8, WHOLE, become_floats=True)
    return StoredQuantization("nvfp4", 4, NVFP4_GROUP, become_floats=True)


def _bitsandbytes(fields: JsonFields) -> StoredQuantization:
    _check(fields, "bnb_4bit_quant_storage", ("uint8",))
    bits = 4 if fields.boolean("load_in_4bit", False) else 8
    return StoredQuantization(BITSANDBYTES, bits, WHOLE, become_floats=True)


def _check_scheme(scheme: JsonFields, **supported: tuple[object, ...]) -> None:
    scheme = scheme.with_defaults({"type": "int", "symmetric": True, "dynamic": False})
    for name, values in supported.items():
        if scheme.raw(name) not in values:
            raise _unsupported(name, scheme.raw(name), ", ".join(map(str, values)))
    told = ("num_bits", "type", "symmetric", "strategy", "dynamic", "block_structure", "group_size", "actorder")
    _check_names(scheme, (*told, "observer", "observer_kwargs", "scale_dtype", "zp_dtype"))


def _check(fields: JsonFields, name: str, supported: tuple[object, ...]) -> None:
    """Raise ModelError unless a value is one of those supported. A missing value counts as the first of them."""
    if (value := fields.raw(name)) is not None and value not in supported:
        raise _unsupported(name, value, ", ".join(map(str, supported)))


def _check_names(fields: JsonFields, known: tuple[str, ...]) -> None:
    for name in fields.names:
        if name not in known and fields.raw(name) not in (None, [], {}):
            raise fields.unsupported(name)


def _block(fields: JsonFields, name: str) -> tuple[int, int] | None:
    """Return outputs and inputs of a block; None if the setting is missing."""
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, list) or [type(size) for size in value] != [int, int]:
        raise fields.error(name, "two integers")
    outputs, inputs = value
    if not (0 < outputs <= MOST_BLOCK and 0 < inputs <= MOST_BLOCK):
        raise fields.error(name, f"two integers from 1 to {MOST_BLOCK}")
    return outputs, inputs


def _group_size(fields: JsonFields, name: str) -> int:
    size = fields.integer(name, minimum=WHOLE)
    if size == 0:
        raise fields.error(name, "above 0, or -1 for one group of all inputs")
    return size


def _unsupported(name: str, value: object, supported: str) -> ModelError:
    return ModelError(f"{name} {value!r} of a quantization_config is not supported; supported are {supported}")


# Settings without effect on the weights, or that only tell which modules are stored as floats, as the tensors do.
_KEPT: Final = ("ignore", "ignored_layers", "modules_to_not_convert", "global_compression_ratio", "version")
_COMPRESSED: Final[dict[str, Callable[[JsonFields, JsonFields], StoredQuantization]]] = {
    "int-quantized": _int_quantized,
    "pack-quantized": _pack_quantized,
    "float-quantized": _float_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}
_READERS: Final[dict[str, Callable[[JsonFields], StoredQuantization]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    BITSANDBYTES: _bitsandbytes,
}
