"""Which tokens a step computes behind those that are known, in the hope that they come. No I/O, no clock.

Tokens that come are those that would come without: the engine chooses each of them as ever, and goes on with the next
one where it has computed that. So what is written here decides about time alone. A step that reads prompts has no
candidates, nor has an answer that moves to another node. Blocks for candidates are taken where they would come free for
nobody else, and are those that the answer needs next in any case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from decode_node.drafts import DraftModel, Drafts
from decode_node.gate import Gate, Record
from decode_node.lookup import Lookup, following
from serving_core.leases import Leases
from serving_core.requests import Work
from serving_core.residents import Resident, Residents, Stage

MOST_ROWS: Final = 64  # tokens of a step with candidates
MOST_TAKEN_IN: Final = 1024  # tokens of a text in one step


class Source(Protocol):
    """Where candidates come from."""

    def opens(self, num_answers: int) -> bool:
        """Whether a step of so many answers may have some."""

    def may_open(self, num_answers: int) -> bool:
        """Whether the one behind a step of so many answers may, as far as can be told while that one runs."""

    def candidates(self, resident: Resident, most: int) -> list[int]:
        """Of one answer, as many as are worth their time, and no more than this."""

    def came(self, resident: Resident, num_candidates: int, num_come: int) -> None:
        """Of its candidates in a step the first so many have come."""

    def took(self, num_answers: int, num_candidates: int, num_come: int, step_s: float) -> None:
        """A step of so many answers alone is done."""


class _Text:
    """What is known of one answer's."""

    def __init__(self) -> None:
        self.lookup = Lookup()
        self.record = Record()


class Lookups:
    """Candidates out of the texts themselves."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._least_probability = 1.0

    def opens(self, num_answers: int) -> bool:
        self._least_probability = self._gate.least_probability(num_answers)
        return self._least_probability < 1

    def may_open(self, num_answers: int) -> bool:
        return self._gate.least_probability(num_answers) < 1

    def candidates(self, resident: Resident, most: int) -> list[int]:
        if resident.draft is None:
            resident.draft = _Text()
        text, token_ids = resident.draft, resident.request.token_ids
        if not text.lookup.take_in(token_ids, MOST_TAKEN_IN):
            return []
        place, num_matching = text.lookup.find(token_ids)
        most = text.record.num_worth_it(num_matching, self._least_probability, most) if num_matching else 0
        return following(token_ids, place, most)

    def came(self, resident: Resident, num_candidates: int, num_come: int) -> None:
        resident.draft.record.add(num_candidates, num_come)

    def took(self, num_answers: int, num_candidates: int, num_come: int, step_s: float) -> None:
        """The gate has it."""


@dataclass(slots=True)
class SpeculationCounts:
    """From the node's start."""

    num_drafts: int = 0  # answers' shares of steps that had candidates
    num_proposed: int = 0  # candidates in them
    num_accepted: int = 0  # of these, the ones that came


class Speculation:
    """The candidates of one node's answers."""

    def __init__(
        self,
        residents: Residents,
        leases: Leases,
        eos_token_ids: Sequence[int],
        num_candidates: int,
        most_tokens: int,
        draft_model: DraftModel | None,
    ) -> None:
        """`num_candidates` is the most for an answer in a step, `most_tokens` that of a whole step; 0 candidates:
        never any. A model with a `draft_model` writes them, or else they are looked up."""
        self._residents = residents
        self._leases = leases
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_candidates = num_candidates
        self._most_rows = min(MOST_ROWS, most_tokens)
        self._gate = Gate()
        self.drafts: Drafts | None = None
        if draft_model is not None and num_candidates:
            self.drafts = Drafts(residents, draft_model, self._gate, num_candidates, self._most_rows)
        self._source: Source = self.drafts or Lookups(self._gate)
        self.counts = SpeculationCounts()

    def extend(self, works: list[Work]) -> list[Work]:
        """A planned step, with candidates where they are worth their time."""
        if not self._num_candidates or self._residents.count(Stage.READING) or not self._source.opens(len(works)):
            return works
        extended, room = [], self._most_rows - len(works)
        for work in works:
            candidates = self._candidates(work, room)
            room -= len(candidates)
            extended.append(work._replace(candidates=candidates) if candidates else work)
        return extended

    def may_extend(self, num_answers: int) -> bool:
        """Whether the step behind a running one of so many answers may get candidates."""
        return self._num_candidates > 0 and self._source.may_open(num_answers)

    def took(self, works: Sequence[Work], nums_given: Sequence[int], step_s: float) -> None:
        """A step of answers alone is done, and has given each so many tokens."""
        if not self._num_candidates:
            return
        counts, num_proposed, num_accepted = self.counts, 0, 0
        for work, num_given in zip(works, nums_given, strict=True):
            if not work.candidates:
                continue
            counts.num_drafts += 1
            num_proposed += len(work.candidates)
            num_accepted += num_given - 1
            self._source.came(self._residents.of(work.request), len(work.candidates), num_given - 1)
        counts.num_proposed += num_proposed
        counts.num_accepted += num_accepted
        self._gate.took(len(works), num_proposed, step_s)
        self._source.took(len(works), num_proposed, num_accepted, step_s)

    def _candidates(self, work: Work, room: int) -> list[int]:
        """Of one answer, at most `room`."""
        resident, request = self._residents.of(work.request), work.request
        most = min(room, self._num_candidates, request.sampling.max_tokens - request.num_output_tokens - 1)
        if most <= 0 or work.num_tokens != 1 or resident.move is not None or resident.hosts:
            return []
        candidates = self._source.candidates(resident, most)
        if candidates:
            candidates = candidates[: self._num_held(resident, len(candidates))]
        return self._before_end(candidates, request.sampling.stop_token_ids)

    def _num_held(self, resident: Resident, num_candidates: int) -> int:
        """How many of so many candidates it has blocks for. It gets more where every request could have one all the
        same."""
        num_tokens = resident.num_computed + 1
        num_missing = self._leases.num_missing(resident, num_tokens + num_candidates)
        if num_missing and self._leases.num_free >= num_missing + len(self._residents):
            self._leases.grow(resident, num_missing)
        assert resident.lease is not None
        return len(resident.lease.block_ids) * self._leases.block_size - num_tokens

    def _before_end(self, token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
        """Those before the first that may end the answer: nothing can be computed behind that."""
        for index, token_id in enumerate(token_ids):
            if token_id in self._eos_token_ids or token_id in stop_token_ids:
                return token_ids[:index]
        return token_ids
