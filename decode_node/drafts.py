"""What a draft model writes ahead, for which answers, and what its own pool holds of their texts. No I/O, no clock.

It computes between two steps. A text that it does not know, of an answer that begins or comes from another node, it
reads in small chunks first; only then there are candidates. Behind those that did not come its KV is overwritten: a
text counts as computed up to where what was written ahead has come.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from decode_node.gate import FORGET_STEPS, Budget, Gate, Record, num_in_a_row
from serving_core.blocks import BlockAllocator, BlockLease
from serving_core.requests import DraftWork, Share
from serving_core.residents import Resident, Residents, Stage

MOST_READ: Final = 64  # tokens of texts between two steps
FEW: Final = 2  # tokens, the most that an answer is behind whose candidates have all come
FIRST_PROBABILITY: Final = 0.7  # that a candidate comes, before any has
WEIGHT: Final = 2  # in candidates, of what is known of others


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What is to be known of a draft model: its own blocks, the longest texts that it reads, and what it takes."""

    num_blocks: int
    block_size: int
    max_model_len: int
    step_s: float  # for one token of one answer


class _Text:
    """What is in the pool of one answer."""

    def __init__(self, lease: BlockLease) -> None:
        self.lease = lease
        self.record = Record()
        self.num_computed = 0
        self.num_tokens = 0  # of the text that was written ahead of
        self.written: list[int] = []

    def follow(self, token_ids: Sequence[int]) -> None:
        """The text is this now. The KV of those that were written ahead and have come is there, but for the last."""
        for token_id, come in zip(self.written[:-1], token_ids[self.num_tokens :], strict=False):
            if token_id != come:
                break
            self.num_computed += 1
        self.written = []


class Drafts:
    """The draft model of one node, as it is planned."""

    def __init__(
        self, residents: Residents, model: DraftModel, gate: Gate, num_candidates: int, most_rows: int
    ) -> None:
        self._residents = residents
        self._model = model
        self._allocator = BlockAllocator(model.num_blocks, caching=False)
        self._gate = gate
        self._budget = Budget()
        self._num_candidates = num_candidates
        self._most_rows = most_rows
        self._texts: dict[Resident, _Text | None] = {}  # None: it goes without
        self._record = Record()  # of all answers
        self._num_plain = 0  # steps without candidates
        self._running: list[tuple[Resident, _Text]] = []
        self._num_answers = 0  # of the step to come
        self._is_stopped = False

    def plan(self) -> list[DraftWork]:
        """What is to be computed before the next step, which no step runs beside. `drafted` or `failed` is to follow,
        unless it is nothing."""
        self._let_go()
        self._num_answers = num_answers = self._residents.count(Stage.WRITING)
        if not num_answers or self._residents.count(Stage.READING) or not self.may_open(num_answers):
            return []
        least_probability = self._least_probability(num_answers)
        works: list[DraftWork] = []
        num_to_read, room = MOST_READ, self._most_rows - num_answers
        for resident in self._residents.in_stage(Stage.WRITING):
            work = self._work(resident, least_probability, num_to_read, room)
            if work is not None:
                works.append(work)
                num_to_read -= _num_read(work)
                room -= work.num_candidates
        return works

    def may_open(self, num_answers: int) -> bool:
        """Whether it may compute anything between two steps of so many answers, as far as its time goes."""
        return not self._is_stopped and self._budget.is_open and self._least_probability(num_answers) < 1

    def drafted(self, works: Sequence[DraftWork], candidates: Sequence[list[int]], draft_s: float) -> None:
        """What was planned is done, and has given these."""
        num_read, num_candidates = sum(map(_num_read, works)), sum(map(len, candidates))
        self._budget.add(-draft_s)
        if num_candidates and not num_read:
            self._gate.drafted(self._num_answers, num_candidates, draft_s)
        for (resident, text), work, written in zip(self._running, works, candidates, strict=True):
            text.num_computed += work.share.num_tokens
            text.num_tokens, text.written = text.num_computed, written
            assert not written or text.num_tokens <= len(resident.request.token_ids)
        self._running = []

    def failed(self) -> None:
        """What was planned gave nothing: there is nothing more to come of this model."""
        self._is_stopped = True
        self._running = []

    def opens(self, num_answers: int) -> bool:
        """Whether there may be candidates in the next step. What was written was worth it."""
        return any(text is not None and text.written for text in self._texts.values())

    def candidates(self, resident: Resident, most: int) -> list[int]:
        """What was written behind the text as it is."""
        text = self._texts.get(resident)
        is_of_now = text is not None and text.num_tokens == len(resident.request.token_ids)
        return text.written[:most] if text is not None and is_of_now else []

    def came(self, resident: Resident, num_candidates: int, num_come: int) -> None:
        """Of its candidates the first so many have come."""
        self._record.add(num_candidates, num_come)
        if (text := self._texts.get(resident)) is not None:
            text.record.add(num_candidates, num_come)

    def took(self, num_answers: int, num_candidates: int, num_come: int, step_s: float) -> None:
        """A step of answers alone is done."""
        if num_candidates:
            plain_s = self._gate.plain_s(num_answers) or step_s
            self._budget.add(plain_s - step_s + num_come * plain_s / num_answers)
            return
        self._budget.took(step_s)
        self._num_plain += 1
        if self._num_plain % FORGET_STEPS == 0:
            self._record.forget()

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that texts of answers hold."""
        return self._allocator.num_blocks - self._allocator.num_free

    def check_integrity(self) -> None:
        """Every block is free, or an answer's."""
        self._allocator.check_integrity()
        assert not self._allocator.num_leaked([text.lease for text in self._texts.values() if text is not None])

    def _least_probability(self, num_answers: int) -> float:
        return self._gate.least_probability_of_drafts(num_answers, self._model.step_s)

    def _let_go(self) -> None:
        """Of answers that have ended or are written elsewhere."""
        for resident in [each for each in self._texts if each not in self._residents]:
            text = self._texts.pop(resident)
            if text is not None:
                text.lease.release()

    def _work(self, resident: Resident, least_probability: float, num_to_read: int, room: int) -> DraftWork | None:
        request = resident.request
        most = min(room, self._num_candidates, request.sampling.max_tokens - request.num_output_tokens - 1)
        if resident.move is not None or resident.hosts or resident.is_ending:
            return None  # it has no candidates
        if most <= 0 or resident.num_to_compute != 1:
            return None
        most = num_in_a_row(self._probability(resident), least_probability, most)
        text = self._text(resident, len(request.token_ids) + most) if most else None
        if text is None:
            return None
        text.follow(request.token_ids)
        num_missing = len(request.token_ids) - text.num_computed
        num_tokens = num_missing if num_missing <= FEW else min(num_missing, num_to_read)
        if not num_tokens:
            return None
        start, is_all = text.num_computed, num_tokens == num_missing
        share = Share(request.token_ids[start : start + num_tokens], start, text.lease.block_ids, samples=is_all)
        self._running.append((resident, text))
        return DraftWork(share, most if is_all else 0)

    def _probability(self, resident: Resident) -> float:
        """That a candidate of it comes."""
        of_all, text = self._record.expected(FIRST_PROBABILITY, WEIGHT), self._texts.get(resident)
        return of_all if text is None else text.record.expected(of_all, WEIGHT)

    def _text(self, resident: Resident, num_tokens: int) -> _Text | None:
        """With blocks for so many tokens. One that begins gets them for all of its text or has to wait, and one that
        finds none on its way goes without from then on: else several would take them from one another for ever."""
        text = self._texts.get(resident)
        if text is None and resident in self._texts:
            return None
        num_held = 0 if text is None else len(text.lease.block_ids)
        num_missing = -(-num_tokens // self._model.block_size) - num_held
        if num_tokens > self._model.max_model_len or num_missing > self._allocator.num_free:
            if text is not None:
                text.lease.release()
                self._texts[resident] = None
            return None
        if text is None:
            text = self._texts[resident] = _Text(self._allocator.allocate(num_missing))
        elif num_missing > 0:
            text.lease.grow(num_missing)
        return text


def _num_read(work: DraftWork) -> int:
    """Tokens of a text that it did not know, beside those that every answer gets."""
    return work.share.num_tokens if work.share.num_tokens > FEW else 0
