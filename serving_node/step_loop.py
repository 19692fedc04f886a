"""Run the steps of a node one after the other, and detect a stuck step.

Everything here runs on the node's event loop, except the calls that the engine's thread makes between two steps.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from decode_node.speculation import DraftModel, Drafts
from engine.drafting import Drafter
from engine.engine import AFTER, DRAFT, IDLE, PLAN, SEND, THREADS, Engine, PreparedStep, StepClock
from engine.stepper import MOST_FAILED_STEPS, NextStep, Step, Stepper, cause_of, is_fatal
from serving_core.errors import RankLost
from serving_core.net.backoff import Backoff
from serving_core.requests import SampledToken, Work
from serving_node.ranks.leading import Followers, die, end_at_once
from serving_node.ranks.transfers import NodeTransfers
from serving_node.watchdog import CALM_S, FIRST_PAUSE_S, LEAST_S, LONGEST_PAUSE_S, Starvation, check_hope, why_stuck
from serving_node.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_NAMED: Final = 16  # request ids in one log line
CHECK_S: Final = 0.1  # between two checks of the running step
WATCHED_FROM_S: Final = 0.5  # age from which a step's CPU starvation is measured


class Stepping:
    """Runs the steps of one node, and detects a stuck one."""

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        transfers: NodeTransfers,
        followers: Followers,
        drafter: Drafter | None,
        *,
        stuck_exit_s: float,
    ) -> None:
        self.stepper: Final[Stepper[Work, list[SampledToken]]] = Stepper(engine.step)
        self._engine = engine
        self._worker, self._scheduler = worker, worker.scheduler
        self._transfers = transfers
        self._followers = followers
        self._drafter = drafter
        self._stuck_exit_s = stuck_exit_s
        self._is_async: Final = engine.can_schedule_async and not len(followers)
        self._works: list[Work] = []  # of the running step; empty between steps
        self._built: PreparedStep | None = None  # the last prepared step, if the running one is it
        self._num_failed_steps = 0  # since the last successful step
        self._starvation: Starvation | None = None  # of the running step, once its age exceeds WATCHED_FROM_S
        self._absences = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, calm_s=CALM_S)
        self._work = asyncio.Event()

    @property
    def clock(self) -> StepClock:
        return self._engine.clock

    def wake(self) -> None:
        """Signal that there may be more to compute than was planned; a step is planned if none runs."""
        self._work.set()

    async def run_between_steps(self, compute: Callable[[], T]) -> T:
        """Run `compute` in the engine's thread between two steps, and return its result.

        It has to be short: the next step waits for it.
        """
        self.wake()  # ends steps that follow each other at once
        return await self.stepper.run_between_steps(compute)

    async def run(self) -> None:
        """Plan and run steps until cancelled. A failed step fails its requests alone."""
        await self.stepper.run(self._plan, self._step, self._work)

    def _plan(self) -> list[Work]:
        self.clock.lap(IDLE)
        works = self._worker.plan()
        self.clock.lap(PLAN)
        self._worker.carry_out(wakes=False)
        self.clock.lap(SEND)
        return works

    async def _step(self, works: list[Work]) -> None:
        """Run a step, the steps that follow it at once, and then the draft model."""
        step: Step[Work, list[SampledToken]] | None = None
        try:
            step = self._begin(works)
            while step is not None:
                self._works = list(step.parts)
                self._build_next(step)
                step = await self._finish(step)
        finally:
            self._works = []
            if step is not None and step.next_step is not None:
                step.next_step.give_up()
        if self._drafter is not None and (drafts := self._scheduler.speculation.drafts) is not None:
            await propose(self._drafter, drafts, self.stepper)
            self.clock.lap(DRAFT)

    def _begin(self, works: list[Work]) -> Step[Work, list[SampledToken]] | None:
        self._built = None
        with self._failing(works):
            self._followers.announce(works)
            sends = self._scheduler.sends_while(works)
            return self.stepper.begin(works, self._transfers.on_layer(sends) if sends else None)
        return None

    def _build_next(self, step: Step[Work, list[SampledToken]]) -> None:
        """Let the engine build the step behind the running one (async scheduling)."""
        if not self._is_async or not (works := self._scheduler.plan_next(step.parts)):
            return
        self._worker.carry_out_now()
        try:
            self._built = built = self._engine.prepare(works, self._built)
        except Exception:
            logger.exception("the next step was not built, and is planned anew", extra=_naming(works))
            return

        parts = step.parts  # not the step itself, which would never be freed

        def follows(tokens: list[SampledToken]) -> bool:
            return not self._work.is_set() and not self._scheduler.ends_any(parts, tokens)

        compute = partial(self._engine.step_prepared, works, built)
        step.next_step = NextStep(works, asyncio.get_running_loop().create_future(), follows=follows, compute=compute)

    async def _finish(self, step: Step[Work, list[SampledToken]]) -> Step[Work, list[SampledToken]] | None:
        """Record the result of a step. Return the step that follows at once, if any."""
        works, done = step.parts, None
        with self._failing(works):
            done = await step.done
        if done is None:
            return None
        self._num_failed_steps = 0
        tokens, step_s, goes_on = done
        if not goes_on:
            self.clock.lap(THREADS)
        self._worker.step_done(works, tokens, step_s, goes_on=goes_on)
        if goes_on:
            next_step, step.next_step = step.next_step, None
            assert next_step is not None
            next_step.take_in()
            self._worker.carry_out_now()  # no sequence has ended and none waits: no deadline has changed
            return next_step
        self.clock.lap(AFTER)
        self._worker.carry_out(wakes=False)
        self.clock.lap(SEND)
        return None

    @contextlib.contextmanager
    def _failing(self, works: Sequence[Work]) -> Iterator[None]:
        """Fail these requests, and no others, if the body raises.

        The process ends after a fatal error, the loss of a rank, or MOST_FAILED_STEPS failures in a row: a node that
        fails everything looks idle and would attract all requests.
        """
        try:
            yield
        except RankLost as error:
            die(error)
        except Exception as error:
            logger.exception("a step failed", extra=_naming(works))
            self._num_failed_steps += 1
            if is_fatal(error):
                end_at_once(f"this node can compute nothing any more and ends: {error}")
            if self._num_failed_steps == MOST_FAILED_STEPS:
                end_at_once(f"{MOST_FAILED_STEPS} steps in a row have failed, and this node ends: {error}")
            self._followers.fail_step(error)
            self._worker.step_failed(works, cause_of(error))
            self._worker.carry_out(wakes=False)

    # ---- stuck steps ----

    async def stuck(self) -> str:
        while True:
            self._look_for_starvation()
            if (why := self._why_stuck()) is not None:
                return why
            await asyncio.sleep(CHECK_S)

    async def recovered(self) -> None:
        was_stuck = self._why_stuck() is not None
        while self._works or self.stepper.step_age_s:  # the draft model may be stuck
            self._look_for_starvation()
            check_hope(self._computing_s, self._scheduler.expected_step_s(self._works), self._stuck_exit_s)
            await asyncio.sleep(CHECK_S)
        if was_stuck:
            await asyncio.sleep(self._absences.next_s(time.monotonic()))

    @property
    def is_stuck(self) -> bool:
        """Return whether the running step takes far longer than expected."""
        return self._why_stuck() is not None

    def _why_stuck(self) -> str | None:
        step_age_s = self._computing_s
        if step_age_s <= LEAST_S:
            return None
        return why_stuck(step_age_s, self._scheduler.expected_step_s(self._works))

    @property
    def _computing_s(self) -> float:
        """Return the age of the running step, without the time in which it had no CPU core."""
        return self.stepper.step_age_s - (self._starvation.seconds if self._starvation else 0.0)

    def _look_for_starvation(self) -> None:
        """Measure the CPU starvation of a long step; short steps are not worth the cost."""
        if self.stepper.step_age_s <= WATCHED_FROM_S:
            self._starvation = None
        elif self._starvation is None:
            self._starvation = Starvation()
        else:
            self._starvation.look()


def _naming(works: Sequence[Work]) -> dict[str, Any]:
    """Return the log fields that name the requests of these scheduled tokens."""
    return {"fields": {"request_ids": [work.request.request_id for work in works[:MAX_NAMED]]}}


def draft_model_of(drafter: Drafter | None) -> DraftModel | None:
    """Return the sizes and the measured speed of a draft model; None without one.

    Call before its pool holds anything.
    """
    if drafter is None:
        return None
    engine = drafter.engine
    return DraftModel(engine.num_blocks, engine.layout.block_size, engine.max_model_len, drafter.measure_step_s())


async def propose(drafter: Drafter, drafts: Drafts, stepper: Stepper[Any, Any]) -> None:
    """Compute the draft tokens of the next step in the stepper's thread, and record them in `drafts`.

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
