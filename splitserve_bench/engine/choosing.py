"""What it costs a step to choose its tokens, by what is asked for: of answers over random logits."""

import statistics
import time
from typing import Any, Final

import torch

from engine.engine import Engine
from engine.model.step_backends import choose_steps
from engine.sampler import sample
from serving_core.requests import Request, SamplingParams
from splitserve_bench.engine.figures import ChoosingFigures

CONTEXT_TOKENS: Final = 512  # of each answer, half of it output: for the penalties
SCALE: Final = 3.0  # of the logits; most of the mass is then with some thousand tokens
STEPS: Final = 4  # in a row
WAYS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.2, top_p 0.9": {"temperature": 0.2, "top_p": 0.9},
    "temperature 1, top_p 0.9": {"top_p": 0.9},
    "temperature 100, top_p 0.9": {"temperature": 100.0, "top_p": 0.9},
    "temperature 0.7, top_p 0.8, top_k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "the same, repetition_penalty 1.05": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "temperature 1, min_p 0.05": {"min_p": 0.05},
    "greedy, all penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
    },
    "temperature 1, logprobs 5": {"logprobs": 5},
}


@torch.inference_mode()
def measure_choosing(engine: Engine, batch: int, repeats: int) -> tuple[ChoosingFigures, ...]:
    """Of so many answers, with the model's vocabulary and on its device."""
    vocab_size, device = engine.config.vocab_size, engine.pool.device
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(batch, vocab_size, generator=generator) * SCALE
    logits, steps = random.to(device, engine.pool.compute_dtype), choose_steps(device)
    figures = []
    for way, fields in WAYS.items():
        requests = [_request(index, vocab_size, fields) for index in range(batch)]
        samples_s = []
        for _ in range(1 + repeats):
            start_s = time.perf_counter()
            for _ in range(STEPS):
                sample(logits, requests, engine.eos_token_ids, steps)
            samples_s.append((time.perf_counter() - start_s) / STEPS)
        figures.append(ChoosingFigures(way, batch, vocab_size, statistics.median(samples_s[1:])))
    return tuple(figures)


def _request(index: int, vocab_size: int, fields: dict[str, Any]) -> Request:
    tokens = [(index * 7919 + place) % vocab_size for place in range(CONTEXT_TOKENS)]
    sampling = SamplingParams(max_tokens=2**30, seed=index, **fields)
    return Request(f"bench-{index}", 0, tokens, CONTEXT_TOKENS // 2, sampling)
