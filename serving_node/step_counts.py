"""What a node counts of its steps, from its start. Pure."""

from typing import Final

from serving_core.costs import StepLoad
from serving_core.histograms import BATCH, Histogram

PHASES: Final = ("prefill", "decode", "mixed")


class StepCounts:
    """Of all steps that gave anything."""

    def __init__(self) -> None:
        self.seconds = {phase: Histogram() for phase in PHASES}
        self.tokens = Histogram(BATCH)  # of prompts, and those that answers got
        self.answers = Histogram(BATCH)
        self.num_prompt_tokens = 0
        self.num_answer_tokens = 0

    def add(self, load: StepLoad, step_s: float, num_more: int = 0) -> None:
        """A step is done, which gave the answers so many tokens more than one each."""
        num_prompt_tokens, num_answers = load.num_prompt_tokens, load.num_answers
        num_answer_tokens = num_answers + num_more
        phase = "decode" if not num_prompt_tokens else "mixed" if num_answers else "prefill"
        self.seconds[phase].observe(step_s)
        self.tokens.observe(num_prompt_tokens + num_answer_tokens)
        self.answers.observe(num_answers)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_answer_tokens += num_answer_tokens
