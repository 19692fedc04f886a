"""Which quantized checkpoints can be read: the quantization_config of config.json; and what goes with --quantization.
Torch-free."""

from dataclasses import dataclass
from typing import Final

from serving_core.errors import ModelError, SettingsError
from serving_core.json_fields import JsonFields

WHOLE: Final = -1  # as a group_size: one group of all inputs


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How the weights of a checkpoint are stored."""

    method: str  # gptq or awq
    bits: int
    group_size: int  # inputs that share a scale; WHOLE: all
    zeros_start_at_one: bool = False  # a stored zero of 0 means 1: what GPTQ's first format does


def check_quantization(quantization: str, stored: StoredQuantization | None) -> None:
    """Raises SettingsError when weights that are stored quantized are to be quantized once more."""
    if stored is not None and quantization != "none":
        raise SettingsError(
            f"--quantization {quantization}: the weights are stored as {quantization_name('none', stored)} already"
        )


def quantization_name(quantization: str, stored: StoredQuantization | None) -> str:
    """What the weights are, in a word: a value of --quantization, or how they are stored, such as gptq-int4."""
    return quantization if stored is None else f"{stored.method}-int{stored.bits}"


def read_stored_quantization(config: JsonFields) -> StoredQuantization | None:
    """None for weights that are stored as floats. Raises ModelError, naming the setting, for what cannot be read."""
    fields = config.nested("quantization_config")
    if fields is None:
        return None
    method = fields.text("quant_method", "")
    if method == "gptq":
        return _gptq(fields)
    if method == "awq":
        return _awq(fields)
    raise _unsupported("quant_method", method, "gptq, awq")


def _gptq(fields: JsonFields) -> StoredQuantization:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise _unsupported("bits", bits, "4, 8")
    stored_as = fields.text("checkpoint_format", "gptq")
    if stored_as not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", stored_as, "gptq, gptq_v2")
    if fields.raw("dynamic"):
        raise ModelError("a quantization_config with dynamic settings for some modules is not supported")
    return StoredQuantization("gptq", bits, _group_size(fields, "group_size"), stored_as == "gptq")


def _awq(fields: JsonFields) -> StoredQuantization:
    bits = fields.integer("bits" if "bits" in fields else "w_bit")
    if bits != 4:
        raise _unsupported("bits", bits, "4")
    version = fields.text("version", "gemm").lower()
    if version != "gemm":
        raise _unsupported("version", version, "gemm")
    if not fields.boolean("zero_point", True):
        raise _unsupported("zero_point", False, "true")
    name = "group_size" if "group_size" in fields else "q_group_size"
    return StoredQuantization("awq", bits, _group_size(fields, name))


def _group_size(fields: JsonFields, name: str) -> int:
    size = fields.integer(name, minimum=WHOLE)
    if size == 0:
        raise fields.error(name, "above 0, or -1 for one group of all inputs")
    return size


def _unsupported(name: str, value: object, supported: str) -> ModelError:
    return ModelError(f"{name} {value!r} of a quantization_config is not supported; supported are {supported}")
