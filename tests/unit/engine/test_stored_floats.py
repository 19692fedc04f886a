"""Quantized checkpoints read as floats: compressed-tensors' own compression and decompression is the oracle, and for
bitsandbytes and ModelOpt numbers that are rounded here one at a time.
"""

import json

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from engine.model.checkpoint import Part, SafetensorsCheckpoint
from engine.model.stored_floats import E2M1, FloatCheckpoint
from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields
from serving_core.model_files.config import read_model_config
from serving_core.model_files.stored_quantization import read_dequantized, read_stored_quantization
from serving_core.node.needs import needs_of
from serving_core.settings import EngineSettings
from serving_core.sharding import Extent
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import NUM_TOKENS, PROMPTS, write_transformers_model
from tests.unit.engine.quantized_checkpoints import PROJECTIONS, SIZES, describe

GENERATOR = torch.Generator().manual_seed(3)
GROUP, OUTPUTS, INPUTS = 16, 40, 64
NF4 = np.sinh(np.linspace(-2, 2, 16)).astype(np.float32) / np.float32(np.sinh(2))  # any 16 floats will do


def of_scheme(form, **weights):
    """The settings of a compressed-tensors checkpoint, once through JSON, and the scheme that they stand for."""
    args = QuantizationArgs(**weights)
    described = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "format": form}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return json.loads(json.dumps(described)), QuantizationScheme(targets=["Linear"], weights=args)


INT = {"type": "int", "strategy": "group", "group_size": GROUP}
SCHEMES = {
    "w4a16": of_scheme("pack-quantized", num_bits=4, **INT),
    "w4a16-asymmetric": of_scheme("pack-quantized", num_bits=4, symmetric=False, **INT),
    "w4a16-channel": of_scheme("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=False),
    "w8a16-packed": of_scheme("pack-quantized", num_bits=8, **INT),
    "w8a16": of_scheme("int-quantized", num_bits=8, type="int", strategy="channel"),
    "w8a16-asymmetric": of_scheme("int-quantized", num_bits=8, symmetric=False, **INT),
    "fp8-tensor": of_scheme("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8-channel": of_scheme("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-block": of_scheme("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    "nvfp4": of_scheme("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "mxfp4": of_scheme("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
}


def compressed(name, weight):
    """The tensors of a weight, and what compressed-tensors makes of them."""
    described, scheme = SCHEMES[name]
    args, (outputs, inputs) = scheme.weights, weight.shape
    if args.strategy == "block":
        rows, columns = args.block_structure
        parts = weight.view(outputs // rows, rows, inputs // columns, columns)
        least, most = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        size = {"tensor": None, "channel": inputs}.get(args.strategy, args.group_size)
        parts = weight.view(outputs, -1, size) if size else weight.view(1, 1, -1)
        least, most = parts.amin(2), parts.amax(2)
    extra = {}
    if name == "nvfp4":
        extra["weight_global_scale"] = (6 * 448 / weight.abs().max()).reshape(1)
    scale, zero = calculate_qparams(least, most, args, global_scale=extra.get("weight_global_scale"))
    if name == "mxfp4":
        scale = torch.exp2(torch.log2(scale).ceil())
    zeros = {} if args.symmetric else {"weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry(described["format"])
    stored = compressor.compress({"weight": weight, "weight_scale": scale, **zeros, **extra}, scheme)
    if name not in ("nvfp4", "mxfp4"):
        return stored, compressor.decompress(stored, scheme)["weight"].float()
    numbers = unpack_fp4_from_uint8(stored["weight_packed"], outputs, inputs, torch.float32)  # it rounds to bfloat16
    scale = stored["weight_scale"].float() if name == "nvfp4" else scale
    return stored, dequantize(numbers, scale, args=args, global_scale=extra.get("weight_global_scale"))


def as_modelopt(weight):
    """NVFP4 as ModelOpt writes it: the scale of all scales multiplies."""
    stored, dense = compressed("nvfp4", weight)
    of_all = 1 / stored["weight_global_scale"].float().reshape(())
    names = {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"], "weight_scale_2": of_all}
    return {**names, "input_scale": torch.tensor(0.5)}, dense


def as_bitsandbytes(weight, *, is_nested, blocksize=32, kind="nf4"):
    flat = weight.numpy().reshape(-1, blocksize)
    scales = np.abs(flat).max(1)
    state = {"quant_type": kind, "blocksize": blocksize, "dtype": "float32", "shape": list(weight.shape)}
    of_scales = {"absmax": torch.from_numpy(scales)}
    if is_nested:
        offset, codes = float(scales.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        spread = np.abs(scales - offset).reshape(-1, 8).max(1)
        numbers = np.abs((scales - offset).reshape(-1, 8)[:, :, None] / spread[:, None, None] - codes).argmin(2)
        scales = (codes[numbers] * spread[:, None]).reshape(-1) + np.float32(offset)
        of_scales = {
            "absmax": torch.from_numpy(numbers.reshape(-1).astype(np.uint8)),
            "nested_absmax": torch.from_numpy(spread),
            "nested_quant_map": torch.from_numpy(codes),
        }
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": offset}
    numbers = np.abs(flat[:, :, None] / scales[:, None, None] - NF4).argmin(2)
    packed = (numbers.reshape(-1)[::2] << 4 | numbers.reshape(-1)[1::2]).astype(np.uint8)
    said = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    tensors = {
        "weight": torch.from_numpy(packed).unsqueeze(1),
        "weight.quant_map": torch.from_numpy(NF4),
        f"weight.quant_state.bitsandbytes__{kind}": said,
        **{f"weight.{name}": tensor for name, tensor in of_scales.items()},
    }
    return tensors, torch.from_numpy((NF4[numbers] * scales[:, None]).reshape(weight.shape))


def as_bytes_of_bitsandbytes(weight):
    scales = weight.abs().amax(1)
    numbers = (weight / scales.unsqueeze(1) * 127).round().to(torch.int8)
    tensors = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, numbers.float() * scales.unsqueeze(1) / 127


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
WRITERS = {
    **{name: (SCHEMES[name][0], lambda weight, name=name: compressed(name, weight)) for name in SCHEMES},
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, as_modelopt),
    "bitsandbytes": (BITSANDBYTES, lambda weight: as_bitsandbytes(weight, is_nested=False)),
    "bitsandbytes-nested": (
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        lambda weight: as_bitsandbytes(weight, is_nested=True, kind="fp4"),
    ),
    "bitsandbytes-8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, as_bytes_of_bitsandbytes),
}


def fields_of(config):
    return JsonFields({"quantization_config": config}, "config.json")


@pytest.fixture(scope="module", params=WRITERS)
def checkpoint(request, tmp_path_factory):
    """A checkpoint of one quantized weight and one that is not, and the floats of both."""
    config, write = WRITERS[request.param]
    weight, norm = torch.randn(OUTPUTS, INPUTS, generator=GENERATOR), torch.randn(7)
    if request.param == "fp8-block":
        weight = torch.randn(48, INPUTS, generator=GENERATOR)
    tensors, dense = write(weight)
    file = tmp_path_factory.mktemp("stored") / "model.safetensors"
    named = {f"m.proj.{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file({**named, "m.norm.weight": norm}, file, {"format": "pt"})
    assert (dense - weight).norm() < 0.2 * weight.norm(), "that is what the numbers stand for"
    floats = FloatCheckpoint(SafetensorsCheckpoint([file]), read_dequantized(fields_of(config)))
    return floats, {"m.proj.weight": dense, "m.norm.weight": norm}


def test_names_and_shapes_are_those_of_floats(checkpoint):
    floats, dense = checkpoint
    assert floats.names() == set(dense)
    for name, tensor in dense.items():
        assert floats.describe(name) == (tuple(tensor.shape), "F32")
        floats.check(Part(name, tuple(Extent(size, range(size)) for size in tensor.shape)))
        assert floats.stored_bytes(Part(name, tuple(Extent(size, range(size)) for size in tensor.shape))) > 0


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_part_is_what_it_stands_for(checkpoint, data):
    floats, dense = checkpoint
    name = data.draw(st.sampled_from(sorted(dense)))
    extents = []
    for size in dense[name].shape:
        first = data.draw(st.integers(0, size - 1))
        extents.append(Extent(size, range(first, data.draw(st.integers(first + 1, size)))))
    held = tuple(slice(extent.held.start, extent.held.stop) for extent in extents)
    torch.testing.assert_close(floats.read_all(Part(name, tuple(extents))), dense[name][held], rtol=2e-6, atol=1e-6)


# ---- whole models ----


def write_stored(dense_folder, stored_folder, name, projections=PROJECTIONS):
    """Quantize the projections of the model in `stored_folder`, and store what they stand for in `dense_folder`."""
    config, write = WRITERS[name]
    tensors = load_file(stored_folder / "model.safetensors")
    dense = dict(tensors)
    for weight_name in list(tensors):
        module, _, kind = weight_name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in projections:
            stored, dense[weight_name] = write(tensors.pop(weight_name).float())
            tensors |= {f"{module}.{kind}": tensor.clone() for kind, tensor in stored.items()}
    save_file(tensors, stored_folder / "model.safetensors", {"format": "pt"})
    save_file(dense, dense_folder / "model.safetensors", {"format": "pt"})
    describe(stored_folder, config)
    return stored_folder, dense_folder


def answers(folder, **options):
    engine = build_engine(EngineSettings(model=str(folder), num_kv_blocks=200, block_size=8, **options))
    return token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), chunk_tokens=19)), engine


@pytest.mark.parametrize("name", ["nvfp4", "bitsandbytes-nested"])
def test_our_decoder_answers_with_the_floats(name, tmp_path):
    folders = [write_tiny_model(tmp_path / kind, "llama", **SIZES) for kind in ("dense", "stored")]
    stored, dense = write_stored(*folders, name)
    found, engine = answers(stored)
    assert found == answers(dense)[0]
    assert engine.description["quantization"] == name.partition("-")[0]
    needs = [
        needs_of(EngineSettings(model=str(folder), num_kv_blocks=9), read_model_config(folder)).weight_bytes
        for folder in (stored, dense)
    ]
    assert needs[0] == needs[1] <= engine.weight_bytes


@pytest.mark.parametrize("name", ["w4a16-asymmetric", "w8a16"])
def test_our_decoder_keeps_integers(name, tmp_path):
    folders = [write_tiny_model(tmp_path / kind, "llama", **SIZES) for kind in ("dense", "stored")]
    stored, dense = write_stored(*folders, name)
    found, engine = answers(stored)
    assert found == answers(dense)[0]
    assert engine.description["quantization"] == name.partition("-")[0]
    assert all(layer.mlp.down_proj.matrix is not None for layer in engine.model.own_layers)


SIZES_OF_GROUPS = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "w4a16"), ("qwen3_moe", "fp8-channel"), ("lfm2", "modelopt")])
def test_transformers_answers_with_the_floats(family, name, tmp_path):
    sizes = {**SIZES_OF_GROUPS, **({"moe_intermediate_size": 32} if family == "qwen3_moe" else {})}
    folders = [write_transformers_model(tmp_path / kind, family, **sizes) for kind in ("dense", "stored")]
    projections = (*PROJECTIONS, "in_proj_qkv", "out_proj", "w1", "w2", "w3")
    stored, dense = write_stored(*folders, name, projections)
    found, engine = answers(stored, model_impl="transformers")
    assert found == answers(dense, model_impl="transformers")[0]
    settings_of = EngineSettings(model=str(stored), num_kv_blocks=200, block_size=8, model_impl="transformers")
    assert needs_of(settings_of, read_model_config(stored, "transformers")).weight_bytes <= engine.weight_bytes


# ---- what is refused ----


def test_a_code_of_four_bits_is_a_float():
    assert (
        tuple(
            (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            for exponent in range(4)
            for mantissa in range(2)
        )
        == E2M1
    )


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("w4a16", ("weight_scale", torch.ones(OUTPUTS, 3)), r"m.proj.weight_scale has shape \[40, 3\]"),
        ("w4a16", ("weight_shape", torch.tensor([OUTPUTS, 60])), "m.proj has 60 inputs; groups of 16 do not divide"),
        ("w4a16", ("weight_packed", torch.zeros(OUTPUTS, 9, dtype=torch.int32)), "m.proj.weight_packed has shape"),
        ("nvfp4", ("weight_global_scale", None), "the weights lack m.proj.weight_global_scale"),
        (
            "nvfp4",
            ("weight_scale", torch.ones(OUTPUTS, 4)),
            "m.proj.weight_scale is stored as F32; supported are F8_E4M3",
        ),
        ("nvfp4", ("weight_packed", torch.zeros(OUTPUTS, 30, dtype=torch.uint8)), "m.proj has 60 inputs; groups of 16"),
        ("mxfp4", ("weight_scale", torch.zeros(OUTPUTS, 3, dtype=torch.uint8)), "m.proj.weight_scale has shape"),
        ("bitsandbytes", ("weight.absmax", torch.ones(3)), r"m.proj.weight.absmax has shape \[3\]"),
        ("bitsandbytes", ("weight.quant_state.bitsandbytes__nf4", None), "the weights lack m.proj.weight.quant_state"),
        (
            "bitsandbytes",
            ("weight.quant_state.bitsandbytes__nf4", torch.tensor([*b'{"shape": [40]}'], dtype=torch.uint8)),
            "bitsandbytes__nf4 does not describe a weight",
        ),
        (
            "bitsandbytes",
            (
                "weight.quant_state.bitsandbytes__nf4",
                torch.tensor([*b'{"shape": [40, 64], "blocksize": 0}'], dtype=torch.uint8),
            ),
            r"has the sizes \[40, 64, 0, 1\]; they must be positive",
        ),
    ],
)
def test_broken_tensors_are_refused_by_name(name, change, sentence, tmp_path):
    config, write = WRITERS[name]
    tensors, _ = write(torch.randn(OUTPUTS, INPUTS, generator=GENERATOR))
    changed, tensor = change
    tensors = {**tensors, changed: tensor}
    file = tmp_path / "model.safetensors"
    named = {f"m.proj.{each}": value.clone() for each, value in tensors.items() if value is not None}
    num_inputs = 60 if "60" in sentence else INPUTS  # where the tensors say so
    save_file(named, file, {"format": "pt"})
    floats = FloatCheckpoint(SafetensorsCheckpoint([file]), read_dequantized(fields_of(config)))
    wanted = [(OUTPUTS, range(OUTPUTS)), (num_inputs, range(num_inputs))]
    with pytest.raises(ModelError, match=sentence):
        floats.check(Part("m.proj.weight", tuple(Extent(*each) for each in wanted)))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (of_scheme("mxfp6-pack-quantized", num_bits=6, type="float")[0], "format 'mxfp6-pack-quantized' of a quant"),
        (of_scheme("pack-quantized", num_bits=3, **INT)[0], "num_bits 3 of a quantization_config"),
        (
            of_scheme("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=32)[0],
            "group_size 32",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' .* NVFP4, FP8"),
        ({**BITSANDBYTES, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
    ],
)
def test_other_schemes_are_refused_by_name(config, sentence):
    with pytest.raises(ModelError, match=sentence):
        read_stored_quantization(fields_of(config))
