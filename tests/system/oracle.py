"""What the answers must be: transformers for real weights, arithmetic for the fake model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.transformers_models import generate

Adjust = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""Takes the logits [vocabulary] and the answer so far; returns the logits to choose from."""


class Reference:
    """A model folder in transformers, float32, on the CPU."""

    def __init__(self, folder: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        where, options = folder, {}
        if (folder / "model.gguf").exists():  # read by transformers itself
            gguf = (folder / "model.gguf").resolve()
            where, options = gguf.parent, {"gguf_file": gguf.name}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(where, dtype=torch.float32, **options).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def greedy(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """Return the answer of transformers' own `generate`, which takes the options."""
        return generate(self.model, prompt, max_tokens, **options)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]: row i predicts the token after token_ids[i]."""
        return self.model(torch.tensor([list(token_ids)])).logits[0]

    def adjusted_greedy(self, prompt: Sequence[int], max_tokens: int, adjust: Adjust) -> list[int]:
        """Greedy with logits that `adjust` has changed, never stopping early."""
        answer: list[int] = []
        while len(answer) < max_tokens:
            logits = adjust(self.logits([*prompt, *answer])[-1].clone(), answer)
            answer.append(int(logits.argmax()))
        return answer


VOCAB_SIZE = 260


def fake_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The fake model's greedy answer: next = (sum of token_id[i] * (i + 1) + context length) mod vocabulary size."""
    context = list(prompt)
    weighted = sum(token * position for position, token in enumerate(context, start=1))
    for _ in range(num_tokens):
        context.append((weighted + len(context)) % VOCAB_SIZE)
        weighted += context[-1] * len(context)
    return context[len(prompt) :]
