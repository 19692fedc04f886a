"""W8A8 and FP8 checkpoints, written by numpy and torch alone, against transformers with the weights they stand for."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from serving_core.errors import ModelError, SettingsError
from serving_core.model_files.config import read_model_config
from serving_core.node.needs import needs_of
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_tiny_llama, write_tiny_model
from tests.toy_scheduler import greedy, random_prompts, run_all
from tests.transformers_models import transformers_model
from tests.unit.engine.quantized_checkpoints import PROJECTIONS, SIZES, describe, edit
from tests.unit.serving_core.test_stored_quantization import loaded

(PROMPT,) = random_prompts([40])
BLOCK = (32, 48)
PROJECTION = "model.layers.0.mlp.up_proj"


def scheme(kind, strategy, dynamic=False, **fields):
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **fields}


def compressed(weights, inputs, form, **fields):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "version": "0.12",
        **fields,
    }


W8A8 = compressed(scheme("int", "channel", observer="minmax"), scheme("int", "token", True), "int-quantized")
FP8 = {
    "channel": compressed(scheme("float", "channel"), scheme("float", "token", True), "float-quantized"),
    "tensor": compressed(scheme("float", "tensor"), scheme("float", "tensor"), "float-quantized"),
    "block": compressed(scheme("float", "block", block_structure=list(BLOCK)), None, "float-quantized"),
    "inverse": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    "one": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "static": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},  # of transformers
}


def as_bytes(weight):
    scales = np.abs(weight).max(1, keepdims=True).astype(np.float32) / np.float32(127)
    numbers = np.clip(np.rint(weight / scales), -127, 127)
    tensors = {"weight": torch.from_numpy(numbers.astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
    return tensors, numbers.astype(np.float32) * scales


def as_fp8(weight, kind):
    """The scales of numbers of at most 448, and what these stand for."""
    rows, columns = (np.arange(size) // step for size, step in zip(weight.shape, BLOCK, strict=True))
    if kind in ("channel", "tensor", "one", "static"):
        rows = np.arange(len(weight)) if kind == "channel" else rows * 0
        columns = columns * 0
    scales = np.zeros((rows.max() + 1, columns.max() + 1), np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            scales[row, column] = np.abs(weight[rows == row][:, columns == column]).max() / np.float32(448)
    spread = scales[rows][:, columns]
    numbers = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
    stored = torch.from_numpy(scales)
    if kind in ("tensor", "one", "static"):
        stored = stored.reshape(1) if kind == "tensor" else stored.reshape(())
    tensors = {"weight": numbers, "weight_scale_inv" if kind in ("inverse", "static") else "weight_scale": stored}
    if kind in ("tensor", "one", "static"):
        tensors["activation_scale" if kind == "static" else "input_scale"] = torch.tensor([0.5])
    return tensors, numbers.float().numpy() * spread


def write(folder, stored_as, config, **sizes):
    """folder/stored with quantized projections, and folder/dense with what they stand for."""
    dense, stored = (write_tiny_model(folder / name, **{**SIZES, **sizes}) for name in ("dense", "stored"))
    tensors, whole = load_file(stored / "model.safetensors"), load_file(dense / "model.safetensors")
    for name in sorted(tensors):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in PROJECTIONS:
            parts, rounded = stored_as(tensors.pop(name).numpy())
            whole[name] = torch.from_numpy(rounded)
            tensors.update({f"{module}.{suffix}": tensor for suffix, tensor in parts.items()})
    save_file(whole, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    describe(stored, config)
    return stored, dense


def write_fp8(folder, kind, **sizes):
    return write(folder, lambda weight: as_fp8(weight, kind), FP8[kind], **sizes)


def load(folder, **settings):
    return build_engine(EngineSettings(model=str(folder), device="cpu", num_kv_blocks=8, **settings))


def error_of(engine, dense):
    """Of the whole vocabulary, after the prompt in chunks."""
    ((token,),) = run_all(engine, [PROMPT], greedy(1, logprobs=VOCAB_SIZE), chunk_tokens=23)
    ours = torch.tensor([logprob for _, logprob in sorted(token.top_logprobs)])
    with torch.inference_mode():
        truth = transformers_model(dense)(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    return (ours - truth).square().mean().sqrt()


def test_bytes_are_computed_with_as_they_are(tmp_path):
    stored, dense = write(tmp_path, as_bytes, W8A8)
    engine = load(stored, dtype="float32")
    assert error_of(engine, dense) < 0.15  # of logprobs that are some 3 apart: what rounding the activations costs
    assert engine.description["quantization"] == "w8a8"
    tensors = load_file(dense / "model.safetensors")
    for number, layer in enumerate(engine.model.own_layers):
        matrix = layer.mlp.down_proj.matrix
        assert matrix.input_bits == 8
        weight = matrix.rows(torch.arange(matrix.num_outputs))
        torch.testing.assert_close(weight, tensors[f"model.layers.{number}.mlp.down_proj.weight"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", FP8)
def test_floats_of_8_bits_are_those_they_stand_for(kind, tmp_path):
    stored, dense = write_fp8(tmp_path, kind)
    engine = load(stored, dtype="float32")
    assert error_of(engine, dense) < 2e-3
    assert engine.description["quantization"] == "fp8"


def test_floats_of_8_bits_can_be_quantized(tmp_path):
    stored, dense = write_fp8(tmp_path, "channel")
    engine = load(stored, dtype="float32", quantization="w8a8")
    assert error_of(engine, dense) < 0.15
    assert engine.description["quantization"] == "w8a8"


@pytest.mark.parametrize("kind", ["bytes", "channel", "inverse"])
def test_ranks_take_their_parts(kind, tmp_path):
    """Rank 1 of 2 starts at neuron 52, within a block."""
    sizes = {"intermediate_size": 104}
    written = write(tmp_path, as_bytes, W8A8, **sizes) if kind == "bytes" else write_fp8(tmp_path, kind, **sizes)
    for rank in range(2):
        ours, theirs = (loaded(folder, rank, 2) for folder in written)
        for ours_layer, theirs_layer in zip(ours.own_layers, theirs.own_layers, strict=True):
            for path in ("self_attn.qkv_proj", "mlp.down_proj"):
                layer, plain = ours_layer.get_submodule(path), theirs_layer.get_submodule(path)
                num_inputs = plain.weight.shape[1] if plain.matrix is None else plain.matrix.num_inputs
                x = torch.randn(5, num_inputs, generator=torch.Generator().manual_seed(1))
                expected = plain(x)
                tolerance = 0.02 * float(expected.abs().max()) if kind == "bytes" else 1e-3
                torch.testing.assert_close(layer(x), expected, rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("kind", ["bytes", "channel"])
def test_they_need_at_least_what_was_said(kind, tmp_path):
    stored, dense = write(tmp_path, as_bytes, W8A8) if kind == "bytes" else write_fp8(tmp_path, kind)
    needs = {
        folder: needs_of(EngineSettings(model=str(folder), num_kv_blocks=7), read_model_config(folder)).weight_bytes
        for folder in (stored, dense)
    }
    assert needs[stored] <= load(stored).weight_bytes
    assert (needs[stored] < needs[dense]) == (kind == "bytes")


def test_bytes_are_not_quantized_again(tmp_path):
    stored, _ = write(tmp_path, as_bytes, W8A8)
    with pytest.raises(SettingsError, match="--quantization int8: the weights are stored as w8a8 already"):
        load(stored, quantization="int8")


def changed(config, *path, value):
    """The same with one setting changed."""
    name, *rest = path
    return {**config, name: changed(config[name], *rest, value=value) if rest else value}


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (changed(W8A8, "format", value="marlin-24"), "format 'marlin-24' .* int-quantized, pack-quantized, float-quan"),
        (changed(W8A8, "format", value="pack-quantized"), "input_activations in .* is not supported"),
        (changed(W8A8, "quantization_status", value="calibration"), "quantization_status 'calibration'"),
        (changed(W8A8, "kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme in .* is not supported"),
        (changed(W8A8, "transform_config", value={"R1": {}}), "transform_config in .* is not supported"),
        (changed(W8A8, "sparsity_config", value={"format": "sparse-24"}), "format 'sparse-24' .* dense"),
        (changed(W8A8, "config_groups", value={}), "config_groups in .* one group"),
        (changed(W8A8, *GROUP, "weights", "num_bits", value=4), "num_bits 4 .* supported are 8"),
        (changed(W8A8, *GROUP, "weights", "symmetric", value=False), "symmetric False"),
        (changed(W8A8, *GROUP, "weights", "strategy", value="group"), "strategy 'group' .* supported are channel"),
        (changed(W8A8, *GROUP, "input_activations", "dynamic", value=False), "dynamic False .* supported are True"),
        (changed(W8A8, *GROUP, "input_activations", "strategy", value="tensor"), "strategy 'tensor' .* are token"),
        (changed(W8A8, *GROUP, "output_activations", value={"num_bits": 8}), "output_activations in .* not supported"),
        (changed(FP8["inverse"], "fmt", value="e5m2"), "fmt 'e5m2' .* supported are e4m3"),
        (changed(FP8["inverse"], "scale_fmt", value="ue8m0"), "scale_fmt 'ue8m0' .* supported are float"),
        (changed(FP8["inverse"], "weight_block_size", value=[128]), "weight_block_size in .* two integers"),
        (changed(FP8["inverse"], "weight_block_size", value=[0, 128]), "two integers from 1 to 65536"),
    ],
)
def test_settings_that_cannot_be_read_are_named(config, sentence, tmp_path):
    describe(write_tiny_llama(tmp_path), config)
    with pytest.raises(ModelError, match=sentence):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("bytes", lambda tensors, name: tensors.update({f"{name}.weight": torch.zeros(96, 64)}), "weight is stored as"),
        (
            "bytes",
            lambda tensors, name: tensors.update({f"{name}.weight_zero_point": torch.ones(96, 1)}),
            "stored as F32; supported are I32, I8",
        ),
        ("channel", lambda tensors, name: tensors.pop(f"{name}.weight_scale"), "lack .*up_proj.weight_scale"),
        (
            "channel",
            lambda tensors, name: tensors.update({f"{name}.weight_scale": torch.ones(7, 1)}),
            r"up_proj.weight_scale has shape \[7, 1\], and the model wants \[96, 1\]",
        ),
        (
            "block",
            lambda tensors, name: tensors.update({f"{name}.weight_scale": torch.ones(96, 1)}),
            r"weight_scale has shape \[96, 1\], and the model wants \[3, 2\]",
        ),
    ],
)
def test_broken_tensors(kind, change, sentence, tmp_path):
    stored, _ = write(tmp_path, as_bytes, W8A8) if kind == "bytes" else write_fp8(tmp_path, kind)
    edit(stored, lambda tensors: change(tensors, PROJECTION))
    with pytest.raises(ModelError, match=sentence):
        load(stored)
