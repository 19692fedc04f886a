"""Greedy answers of a whole cluster against transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.system.answers import ask_all, request
from tests.system.cluster import Cluster
from tests.system.oracle import Reference

NUM_TOKENS: Final = 20


async def check_greedy_answers(cluster: Cluster, model: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Asks all at once: their answers are those of transformers' `generate`, and afterwards nothing is held."""
    asked = [request(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) for prompt in prompts]
    async with cluster.connect() as stub:
        answers = await ask_all(stub, asked)
    reference = Reference(model)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference.greedy(prompt, NUM_TOKENS, eos_token_id=-1)
    cluster.wait_all_free()
