"""The noise of a simulated node: equal steps take different times. Pure."""

from random import Random

from splitserve_bench.simulate.costs import StepLoad
from splitserve_bench.simulate.spread import NUM_FACTORS, Spread, equal_shares


class Noise:
    """What the steps of one node take, as multiples of their mean. The factor of a step depends on its number and its
    kind, whoever asks and how often."""

    def __init__(self, answers: Spread, prompts: Spread, seed: str) -> None:
        """`seed`: a node of its own noise has one of its own."""
        self._answers, self._prompts = equal_shares(answers), equal_shares(prompts)
        self._places = list(range(NUM_FACTORS))
        Random(seed).shuffle(self._places)

    def factor(self, step: int, load: StepLoad) -> float:
        """Of the node's step of this number, from 0; one with prompts spreads as they do."""
        place = self._places[step % NUM_FACTORS]
        return self._prompts[place] if load.num_prompt_tokens else self._answers[place]
