"""Compute the deadlines of an output's tokens. Pure; no clock."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Due:
    """The deadlines of one output, by the owner's clock; inf is no limit.

    Meeting every deadline meets the limit on the mean TPOT, wherever the output ends.
    """

    first_s: float = math.inf  # of the first token
    tpot_s: float = math.inf  # time per output token: token k after the first is due k times this after the first
    began_s: float | None = None  # when the first token came
    refuses_late: bool = False  # refuse a prompt that cannot meet its deadline, unless half of it is prefilled

    def token_s(self, index: int) -> float:
        """Return the deadline of a token, 0 for the first; inf while the time of the first token is unknown."""
        if index == 0:
            return self.first_s
        return math.inf if self.began_s is None else self.began_s + index * self.tpot_s
