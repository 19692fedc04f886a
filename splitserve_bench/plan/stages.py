"""Steps of a node whose layers are divided over stages of some ranks each (engine/pipeline.py), worked out from those
of as many ranks that hold all layers.

    answers      one stage after the other, so what all layers take, and the hops
    chunks       in m micro-batches as the engine cuts them, of which stages compute several at once: with p stages
                 (m + p - 1) / p times what one of them takes on all layers, and the hops
    hops         a message from each stage to the next, of two vectors a token (what goes on, and what is still to be
                 added), and of the logits back to the first rank

Stages count as equally deep, and a hop is not hidden behind anything.
"""

from dataclasses import dataclass
from typing import Final

from engine.micro_batches import num_micro_batches
from splitserve_bench.plan.roofline import LINK, Roofline
from splitserve_bench.simulate.costs import StepLoad

VECTORS: Final = 2


@dataclass(frozen=True, slots=True)
class StagedRoofline:
    """Steps of a model on `pp` stages; `stage` is what a node of one of them would take with all layers."""

    stage: Roofline
    pp: int

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        return self.stage.answers_s(num_answers, context_tokens) + self._hops_s(num_answers, num_answers)

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        num_parts = num_micro_batches(int(num_tokens), self.pp)
        part_tokens = num_tokens / num_parts
        part_s = self.stage.chunk_s(part_tokens, before_tokens + (num_tokens - part_tokens) / 2)
        return self._filled(num_parts, part_s) + self._hops_s(part_tokens, 1)

    def both_s(self, load: StepLoad) -> float:
        num_tokens = load.num_answers + load.num_prompt_tokens
        num_parts = num_micro_batches(num_tokens, self.pp)
        further = (
            load.num_prompt_tokens * (1 - 1 / num_parts) / 2
        )  # tokens of the step's own before a part's, on average
        part_s = self.stage.mixed_s(
            load.num_answers / num_parts,
            load.num_cached / load.num_answers,
            load.num_prompt_tokens / num_parts,
            load.num_before / load.num_prompt_tokens + further,
        )
        return self._filled(num_parts, part_s) + self._hops_s(num_tokens / num_parts, load.num_answers + 1)

    def _filled(self, num_parts: int, part_s: float) -> float:
        """Parts of a step, each of which takes so long on all layers."""
        return (num_parts + self.pp - 1) / self.pp * part_s

    def _hops_s(self, num_tokens: float, num_sampled: float) -> float:
        model, link = self.stage.model, self.stage.link
        num_bytes = VECTORS * num_tokens * model.hidden_size * model.dtype_bytes
        logits_bytes = num_sampled * model.vocab_size * model.dtype_bytes
        sent_bytes = (self.pp - 1) * num_bytes + logits_bytes
        return self.pp * link.latency_s + sent_bytes / (link.bytes_per_s * LINK)
