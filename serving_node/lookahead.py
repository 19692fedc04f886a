"""The step behind one that still runs, so that it can be built meanwhile and begin at once. Pure.

It is planned only where nobody else could have a part in it: if the running step ends no answer and nothing else
happens, `NodeLogic.plan` would give the same. Otherwise it is never begun, so nothing has to be undone but a block here
and there that an answer has got one step early.
"""

from collections.abc import Sequence

from serving_core.leases import Leases
from serving_core.requests import Work
from serving_core.residents import Residents, Stage
from serving_node.streak import grow, is_calm


def works_ahead(works: Sequence[Work], residents: Residents, leases: Leases) -> list[Work]:
    """One token more of each answer of the running step, whose own is not known yet; with the blocks for it. Empty
    where the step is of anything but all answers, one is at its last token or may have blocks elsewhere, or blocks are
    short."""
    if len(works) != residents.count(Stage.WRITING) or not is_calm(residents):
        return []
    at_work = [residents.of(work.request) for work in works]
    for work, resident in zip(works, at_work, strict=True):
        request = work.request
        if resident.stage is not Stage.WRITING or work.num_tokens != 1 or work.candidates or not resident.in_step:
            return []
        if resident.hosts:
            return []
        if request.num_output_tokens + 1 >= request.sampling.max_tokens:
            return []
    if not grow(at_work, leases, 2):
        return []
    for resident in at_work:
        resident.num_candidates = 1
    return [Work(work.request, work.start + 1, 1, work.block_ids) for work in works]
