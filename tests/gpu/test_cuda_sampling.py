"""Tokens sampled on CUDA: as on the CPU, each row by itself, and without awaiting the device."""

import numpy as np
import pytest
import torch

from engine.ops.base import Ops
from engine.ops.topk_topp import RowSampling
from engine.sampler import adjust
from serving_core.requests import Request, SamplingParams

OPS = Ops()
SETTINGS = [
    {},
    {"top_k": 7},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_p": 0.8, "top_k": 20},
    {"top_p": 0.95, "min_p": 0.01},
]


@pytest.fixture
def nothing_is_awaited():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def random(num_rows, num_columns, dtype):
    generator = torch.Generator().manual_seed(num_columns)
    return (torch.randn(num_rows, num_columns, generator=generator) * 3).to(dtype)


def samplings_for(num_rows):
    numbers = np.random.default_rng(3).random(num_rows).tolist()
    return [RowSampling(row, numbers[row], 0.8, **SETTINGS[row % len(SETTINGS)]) for row in range(num_rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [401, 20_011])
def test_samplings(dtype, num_columns):
    logits, samplings = random(30, num_columns, dtype), samplings_for(30)
    highest, _ = OPS.likeliest(logits)
    on_device, there = logits.cuda(), highest.cuda()
    tokens = OPS.sample(on_device, there, samplings).tolist()
    assert tokens == OPS.sample(logits, highest, samplings).tolist()
    assert tokens[::-7] == OPS.sample(on_device, there, samplings[::-7]).tolist()
    for row, sampling in enumerate(samplings):
        alone = OPS.sample(on_device[row : row + 1].clone(), there[row : row + 1], [sampling._replace(row=0)])
        assert alone.tolist() == [tokens[row]]


def test_sampling_awaits_nothing(request):
    logits = random(30, 5000, torch.bfloat16).cuda()
    request.getfixturevalue("nothing_is_awaited")
    highest, _ = OPS.likeliest(logits)
    OPS.sample(logits, highest, samplings_for(30)[1:])


def test_adjusting_awaits_nothing(request):
    logits = random(1, 5000, torch.float32).cuda()
    sampling = SamplingParams(
        max_tokens=9,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logit_bias=((3, 1.0),),
        min_tokens=5,
        stop_token_ids=(9,),
        allowed_token_ids=(3, 9, 11),
    )
    request.getfixturevalue("nothing_is_awaited")
    adjust(logits[0], Request("r", 0, [3, 4, 3, 11], 2, sampling), (2,))
