"""The noise of a simulated node and of its messages: equal steps and messages take different times. Pure."""

from random import Random
from typing import Final

from splitserve_bench.simulate.costs import StepLoad
from splitserve_bench.simulate.spread import NO_SPREAD, Spread, equal_shares


class Draws:
    """Factors of a spread, one for each number from 0: the same whoever asks and how often."""

    def __init__(self, spread: Spread, seed: str) -> None:
        """Draws of spreads that differ and of one seed are large and small at the same numbers."""
        self._factors = list(equal_shares(spread))
        if len(self._factors) > 1:
            Random(seed).shuffle(self._factors)

    def factor(self, number: int) -> float:
        """What the step or the message of this number takes, as a multiple of what the profile says."""
        return self._factors[number % len(self._factors)]


class Noise:
    """Of one node: its steps, and the messages to it and from it."""

    def __init__(
        self,
        answers: Spread = NO_SPREAD,
        prompts: Spread = NO_SPREAD,
        messages: Spread = NO_SPREAD,
        seed: str = "",
    ) -> None:
        """Each node of a fleet needs a `seed` of its own."""
        self._answers, self._prompts = Draws(answers, seed), Draws(prompts, seed)
        self.commands, self.events = Draws(messages, f"{seed} commands"), Draws(messages, f"{seed} events")

    def step(self, number: int, load: StepLoad) -> float:
        """Return the factor of the node's step of this number: one with prompts spreads as they do."""
        return (self._prompts if load.num_prompt_tokens else self._answers).factor(number)


NO_NOISE: Final = Noise()
NO_DRAWS: Final = Draws(NO_SPREAD, "")
