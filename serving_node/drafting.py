"""Has a draft model write ahead between a node's steps."""

import logging
from functools import partial
from typing import Any

from decode_node.speculation import DraftModel, Drafts
from engine.drafting import Drafter
from engine.stepper import Stepper

logger = logging.getLogger(__name__)


def draft_model_of(drafter: Drafter | None) -> DraftModel | None:
    """What decisions know of it. To be asked before its pool holds anything."""
    if drafter is None:
        return None
    engine = drafter.engine
    return DraftModel(engine.num_blocks, engine.layout.block_size, engine.max_model_len, drafter.measure_step_s())


async def write_ahead(drafter: Drafter, drafts: Drafts, stepper: Stepper[Any, Any]) -> None:
    """Computes what the next step's answers may have, in the engine's thread. A draft model that fails is used no more:
    answers need none."""
    if not (works := drafts.plan()):
        return
    try:
        candidates, draft_s = await stepper.between(partial(drafter.write_ahead, works))
    except Exception:
        logger.exception("the draft model failed: there are no candidates any more")
        drafts.failed()
    else:
        drafts.drafted(works, candidates, draft_s)
