"""Run a draft model between a node's steps."""

import logging
from functools import partial
from typing import Any

from decode_node.speculation import DraftModel, Drafts
from engine.drafting import Drafter
from engine.stepper import Stepper

logger = logging.getLogger(__name__)


def draft_model_of(drafter: Drafter | None) -> DraftModel | None:
    """Return the data of a draft model on which decisions depend. Call before its pool holds anything."""
    if drafter is None:
        return None
    engine = drafter.engine
    return DraftModel(engine.num_blocks, engine.layout.block_size, engine.max_model_len, drafter.measure_step_s())


async def propose(drafter: Drafter, drafts: Drafts, stepper: Stepper[Any, Any]) -> None:
    """Compute the draft tokens of the next step in the engine's thread.

    A draft model that fails is not used again; sequences continue without draft tokens.
    """
    if not (works := drafts.plan()):
        return
    try:
        draft_tokens, draft_s = await stepper.between(partial(drafter.propose, works))
    except Exception:
        logger.exception("the draft model failed: there are no draft tokens any more")
        drafts.failed()
    else:
        drafts.drafted(works, draft_tokens, draft_s)
