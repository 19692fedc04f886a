"""What a door has to say of a request that has no field for it. Pure."""

from dataclasses import dataclass
from typing import Final

from coordinator.text.asked import NO_LEEWAY, Leeway


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one request."""

    default_max_tokens: int | None = None  # instead of the model's own
    num_prompts_behind: int = 0  # of the same call
    drops_answers: bool = False  # it asks about its prompt: there may be no room for any answer
    keeps_first: bool = False  # of the tokens of a prompt that is cut, instead of the last ones
    leeway: Leeway = NO_LEEWAY


USUAL: Final = Terms()
