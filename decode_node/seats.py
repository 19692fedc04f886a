"""How many answers a node may write at once, so that they can keep their limits. No I/O, no clock."""

import math
from collections.abc import Sequence
from typing import Final

from serving_core.costs import StepCosts
from serving_core.residents import Resident, Stage

STRETCH: Final = 1.3  # of the tightest limit, by a step with all of them: some are ahead of theirs, and some soon end


def seats_in_time(seated: Sequence[Resident], costs: StepCosts) -> float:
    """Of as many answers as this, with contexts such as these have, a step takes STRETCH times the tightest of their
    limits; at least 1, inf without limits. A limit that one answer alone would miss holds nobody up."""
    tpots_s = [each.due.tpot_s for each in seated if each.due is not None and each.due.tpot_s < math.inf]
    if not tpots_s:
        return math.inf
    weights = costs.weights
    num_cached = sum(each.num_computed for each in seated if each.stage is Stage.WRITING) / len(seated)
    kept_s = [tpot_s for tpot_s in tpots_s if weights.num_answers_within(tpot_s, num_cached)]
    return weights.num_answers_within(STRETCH * min(kept_s), num_cached) if kept_s else math.inf
