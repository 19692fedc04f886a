"""When the tokens of an answer are due. Pure; no clock."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Due:
    """The deadlines of one answer, by the clock of whoever holds this; inf is no limit.

    Whoever keeps them all keeps the limit on the mean time of a token, wherever the answer ends.
    """

    first_s: float = math.inf  # of the first token
    tpot_s: float = math.inf  # that each later one has: token k after the first is due k times this after the first
    began_s: float | None = None  # when the first token came
    refuses_late: bool = False  # a prompt that cannot be in time any more is refused, unless half of it is computed

    def token_s(self, index: int) -> float:
        """When a token is due, 0 for the first; inf also while nobody knows when the first came."""
        if index == 0:
            return self.first_s
        return math.inf if self.began_s is None else self.began_s + index * self.tpot_s
