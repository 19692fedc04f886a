"""Greedy answers through the whole split equal transformers' `generate`, token for token, in float32.

Blocks of 8 tokens, chunks of 64, and no more than 6 requests in a decode batch: prompts cross block and chunk borders,
and batches are joined and left all the time.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.system.answers import request, stream
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

PROMPT_LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257, 420]


@dataclass(frozen=True)
class Shape:
    """A model family and what is special about this one."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    ipc: bool = False


SHAPES = {
    "llama, grouped queries, tied head, tcp": Shape("llama", {"tie_word_embeddings": True}),
    "llama, one KV head of 18, llama3 rope, ipc": Shape(
        "llama",
        {
            "num_key_value_heads": 1,
            "head_dim": 18,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        ipc=True,
    ),
    "mistral, sliding window of 20, tcp": Shape("mistral", {"sliding_window": 20, "head_dim": 16}),
    "qwen2, yarn rope, tied head, ipc": Shape(
        "qwen2",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
            },
        },
        ipc=True,
    ),
    "qwen3, no sharing of KV heads, linear rope, tcp": Shape(
        "qwen3",
        {
            "num_key_value_heads": 4,
            "head_dim": 10,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 4.0},
        },
    ),
}


QUICK = ("mistral, sliding window of 20, tcp",)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=() if name in QUICK else pytest.mark.nightly)
        for name, shape in SHAPES.items()
    ],
)
async def test_greedy_answers_equal_transformers_generate(shape, start_cluster, tmp_path):
    model = write_tiny_model(tmp_path / "model", shape.family, **shape.config)
    cluster = start_cluster(model, ipc=shape.ipc, prefill={"max_num_batched_tokens": 64}, decode={"max_num_seqs": 6})
    rng = random.Random(str(shape))
    questions = [([rng.randrange(256) for _ in range(length)], rng.randint(1, 40)) for length in PROMPT_LENGTHS]
    rng.shuffle(questions)

    async with cluster.connect() as stub:
        streams = []
        for prompt, max_tokens in questions:
            streams.append(stream(stub, request(prompt, max_tokens=max_tokens, temperature=0)))
            await asyncio.sleep(rng.uniform(0, 0.03))
        answers = [await answer.complete() for answer in streams]

    reference = Reference(model)
    for (prompt, max_tokens), answer in zip(questions, answers, strict=True):
        expected = reference.greedy(prompt, max_tokens)
        assert answer.token_ids == expected, f"prompt of {len(prompt)} tokens"
        assert answer.text == reference.tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.complete.prompt_tokens == len(prompt)
        assert answer.finish_reason == ("STOP" if expected[-1] == reference.model.config.eos_token_id else "LENGTH")
    cluster.wait_all_free()
    cluster.stop()
