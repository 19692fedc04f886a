"""Checkpoints whose quantized weights transformers makes floats of as it loads them: the answers are those of the same
weights, made floats here, one number at a time."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from serving_core.errors import ModelError
from serving_core.settings import EngineSettings
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import NUM_TOKENS, PROMPTS, write_transformers_model

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
PROJECTIONS = ("a_proj", "b_proj", "down_proj", "gate_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj")


def answers(folder, **settings):
    engine = build_engine(EngineSettings(model=str(folder), num_kv_blocks=64, block_size=8, **settings))
    return token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), chunk_tokens=19))


def rewrite(folder, quantization_config, tensors):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization_config}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def in_fp8(weight):
    """Return the numbers, the scale of each block, and the weight that they stand for."""
    num_outputs, num_inputs = weight.shape
    scales = torch.zeros(-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
    numbers, dense = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = weight[at].abs().max() / 448
            numbers[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
            dense[at] = numbers[at].float() * scales[row, column]
    return numbers, scales, dense


def test_fp8_in_blocks_as_deepseek_is_published(tmp_path):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 32, "kv_lora_rank": 16}
    folder = write_transformers_model(tmp_path / "fp8", "deepseek_v3", **sizes, q_lora_rank=32)
    floats = shutil.copytree(folder, tmp_path / "floats")
    stored, dense = load_file(folder / "model.safetensors"), load_file(floats / "model.safetensors")
    for name in list(stored):
        module = name.removesuffix(".weight")
        if module.endswith(PROJECTIONS) and not any(size % BLOCK for size in stored[name].shape):
            stored[name], stored[f"{name}_scale_inv"], dense[name] = in_fp8(stored[name])
    assert sum(name.endswith("_scale_inv") for name in stored) > 20
    rewrite(folder, FP8, stored)
    save_file(dense, floats / "model.safetensors", {"format": "pt"})
    assert answers(folder) == answers(floats)


def test_mxfp4_as_gpt_oss_is_published(tmp_path):
    folder = write_transformers_model(tmp_path / "mxfp4", "gpt_oss", hidden_size=64, intermediate_size=64)
    floats = shutil.copytree(folder, tmp_path / "floats")
    stored, dense = load_file(folder / "model.safetensors"), load_file(floats / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = stored.pop(name).shape
        groups = num_inputs // 32
        blocks = torch.randint(256, (num_experts, num_outputs, groups, 16), generator=generator)
        scales = torch.randint(121, 125, (num_experts, num_outputs, groups), generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks.to(torch.uint8), scales.to(torch.uint8)
        numbers = torch.stack((blocks % 16, blocks // 16), dim=-1).flatten(-2)
        signed = torch.tensor([*E2M1, *(-each for each in E2M1)])[numbers]
        weight = signed * 2.0 ** (scales.unsqueeze(-1) - 127)
        dense[name] = weight.flatten(-2).transpose(1, 2).contiguous()
    rewrite(folder, {"quant_method": "mxfp4"}, stored)
    save_file(dense, floats / "model.safetensors", {"format": "pt"})
    assert answers(folder) == answers(floats)


def test_other_formats_are_refused_by_name(tmp_path):
    folder = write_transformers_model(tmp_path / "model", "gpt_oss")
    rewrite(folder, {"quant_method": "quark"}, load_file(folder / "model.safetensors"))
    with pytest.raises(ModelError, match="quant_method 'quark' of a quantization_config is not supported"):
        answers(folder)
