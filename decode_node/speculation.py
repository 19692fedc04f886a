"""Speculative decoding: which draft tokens a step verifies. No I/O, no clock.

Pure.

The last tokens are looked for among those before them by chains of places with one hash, as LZ77 compressors do it. Of
the places found the one with the longest match is taken, of equals the latest. Where what follows it reaches the end of
the text, it goes on with itself: a text that repeats is continued.

A step with so many answers takes a certain time, and a candidate in it a part of that more; both are measured, apart
for each power of two of answers. A candidate that comes is worth the time that a token takes without it. So it is to
come with a probability of at least

    seconds of a candidate / (seconds of a step / answers)

and a little more. On hardware that has arithmetic to spare that is little for few answers, and more than 1 for many:
then there are no candidates.

Those that a draft model writes take its time too, which is measured beside the other. What it takes to be tried, where
it may never help, is bounded by a budget.

It computes between two steps. A text that it does not know, of an answer that begins or comes from another node, it
reads in small chunks first; only then there are candidates. Behind those that did not come its KV is overwritten: a
text counts as computed up to where what was written ahead has come.

Tokens that come are those that would come without: the engine chooses each of them as ever, and goes on with the next
one where it has computed that. So what is written here decides about time alone. A step that reads prompts has no
candidates, nor has an answer that moves to another node. Blocks for candidates are taken where they would come free for
nobody else, and are those that the answer needs next in any case.
"""

import math
import statistics
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from serving_core.blocks import BlockAllocator, BlockLease
from serving_core.leases import Leases
from serving_core.node_requests import NodeRequest, NodeRequests, Stage
from serving_core.requests import DraftWork, Share, Work

SHORTEST: Final = 3  # tokens that match; fewer tell little
LONGEST: Final = 32  # a longer match tells no more
MOST_TRIED: Final = 6  # places
NUM_CHAINS: Final = 2**14  # 64 KiB for a text; every token of it takes 4 bytes more
NOWHERE: Final = -1
_FACTORS: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class Lookup:
    """Knows one text, which only grows."""

    def __init__(self) -> None:
        self._last = array("i", (NOWHERE,)) * NUM_CHAINS  # place of each chain
        self._before: array[int] = array("i")  # of each place, the one before it in its chain

    def take_in(self, token_ids: Sequence[int], most_tokens: int) -> bool:
        """Takes in so many tokens more of the text, if there are so many; tells whether it knows all of it. Takes less
        than a microsecond a token."""
        last, before = self._last, self._before
        first, second, third = _FACTORS
        for end in range(len(before), min(len(token_ids), len(before) + most_tokens)):
            if end < SHORTEST - 1:
                before.append(NOWHERE)
                continue
            mixed = token_ids[end] * first + token_ids[end - 1] * second + token_ids[end - 2] * third
            chain = (mixed >> 16) % NUM_CHAINS
            before.append(last[chain])
            last[chain] = end
        return len(before) == len(token_ids)

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The place that the end of this text, all of which it knows, matches best, and how many tokens match; (-1, 0)
        where no place does."""
        found, longest = NOWHERE, SHORTEST - 1
        for place, length in self.places(token_ids):
            if length > longest:
                found, longest = place, length
            if longest == LONGEST:
                break
        return (found, longest) if found != NOWHERE else (NOWHERE, 0)

    def places(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Places that the end of this text, all of which it knows, may match, the latest first, and how many tokens
        do."""
        end = len(token_ids) - 1
        place = self._before[end] if end >= 0 else NOWHERE
        for _ in range(MOST_TRIED):
            if place == NOWHERE:
                return
            yield place, _matching(token_ids, place, end)
            place = self._before[place]


def following(token_ids: Sequence[int], place: int, num_tokens: int) -> list[int]:
    """What would come behind the text if it went on as it did behind this place."""
    period = len(token_ids) - 1 - place
    return [token_ids[place + 1 + index % period] for index in range(num_tokens)]


def _matching(token_ids: Sequence[int], place: int, end: int) -> int:
    """How many tokens up to the two places are the same, up to LONGEST."""
    most = min(LONGEST, place + 1)
    for length in range(most):
        if token_ids[place - length] != token_ids[end - length]:
            return length
    return most


MARGIN: Final = 1.15  # by which a candidate is to be worth more than it takes
NUM_RECENT: Final = 16  # steps of each kind that count
LEAST_STEPS: Final = 4  # without candidates, before there are any
FIRST_SHARE: Final = 0.5  # of a token's time, that a candidate is taken to need before it is measured
FORGET_STEPS: Final = 32  # without candidates, behind which one that had some counts no more
KEPT: Final = 0.9  # of what is known of an answer's candidates, for each step that has more of them
BUDGET_SHARE: Final = 0.02  # of the time of steps, that a draft model may lose
BUDGET_S: Final = 0.25  # that it may lose at once, if it has gained nothing; so much there is at first
MOST_GAINED_S: Final = 5.0  # of what it has gained, that it may lose again


class _Size:
    """Steps with about as many answers."""

    def __init__(self) -> None:
        self.plain_s: deque[float] = deque(maxlen=NUM_RECENT)
        self.shares: deque[float] = deque(maxlen=NUM_RECENT)  # of a plain step that one candidate takes
        self.draft_shares: deque[float] = deque(maxlen=NUM_RECENT)  # that it takes to be written by a draft model
        self.num_plain = 0


class Gate:
    """What steps of one node take, with candidates and without. All of them are without prompts."""

    def __init__(self) -> None:
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)  # by the bits of the number of answers

    def took(self, num_answers: int, num_candidates: int, step_s: float) -> None:
        """A step is done."""
        size = self._sizes[num_answers.bit_length()]
        if not num_candidates:
            size.plain_s.append(step_s)
            size.num_plain += 1
            if size.num_plain % FORGET_STEPS == 0:
                for shares in filter(None, (size.shares, size.draft_shares)):
                    shares.popleft()
        elif size.plain_s:
            plain_s = statistics.median(size.plain_s)
            size.shares.append(max(0.0, step_s / plain_s - 1) / num_candidates)

    def drafted(self, num_answers: int, num_candidates: int, draft_s: float) -> None:
        """A draft model has written so many candidates for a step of so many answers."""
        size = self._sizes[num_answers.bit_length()]
        if size.plain_s:
            size.draft_shares.append(draft_s / statistics.median(size.plain_s) / num_candidates)

    def plain_s(self, num_answers: int) -> float:
        """Seconds of a step of so many answers without candidates; 0 before one was measured."""
        size = self._sizes[num_answers.bit_length()]
        return statistics.median(size.plain_s) if size.plain_s else 0.0

    def least_probability(self, num_answers: int) -> float:
        """That a candidate has to come with in a step of so many answers; inf before enough is known."""
        size = self._sizes[num_answers.bit_length()]
        if len(size.plain_s) < LEAST_STEPS:
            return math.inf
        if not size.shares:
            return FIRST_SHARE
        return MARGIN * num_answers * statistics.median(size.shares)

    def least_probability_of_drafts(self, num_answers: int, step_s: float) -> float:
        """The same, where the candidate is still to be written by a draft model, which takes step_s for one token."""
        size, wider = self._sizes[num_answers.bit_length()], self.least_probability(num_answers)
        if wider == math.inf:
            return wider
        known = [num_answers * share for share in size.draft_shares] or [step_s / statistics.median(size.plain_s)]
        drafted = MARGIN * statistics.median(known)
        return wider + drafted if size.shares else max(wider, drafted)


class Budget:
    """The seconds that a draft model may lose: a share of the time of steps, and what it has gained before."""

    def __init__(self) -> None:
        self._left_s = BUDGET_S

    @property
    def is_open(self) -> bool:
        """Whether there is anything left."""
        return self._left_s > 0

    def add(self, gained_s: float) -> None:
        """So much was gained, or lost where it is negative."""
        self._left_s = min(MOST_GAINED_S, self._left_s + gained_s)

    def took(self, step_s: float) -> None:
        """A step without candidates is done."""
        if self._left_s < BUDGET_S:
            self._left_s = min(BUDGET_S, self._left_s + BUDGET_SHARE * step_s)


class Record:
    """What has come of one answer's candidates."""

    def __init__(self) -> None:
        self._num_come = self._num_missed = 0.0  # lately

    def add(self, num_candidates: int, num_come: int) -> None:
        """Of so many candidates the first so many have come."""
        self._num_come = KEPT * self._num_come + num_come
        self._num_missed = KEPT * self._num_missed + (num_come < num_candidates)

    def probability(self, num_matching: int) -> float:
        """That the next candidate comes, behind a match of so many tokens: the longer it is, the likelier, and the more
        that weighs against what has come so far."""
        return self.expected(num_matching / (num_matching + 2), num_matching / 2)

    def expected(self, probability: float, weight: float) -> float:
        """The probability that the next candidate comes, where so much was to be expected before any had, and that
        weighs as much as so many candidates."""
        return (self._num_come + weight * probability) / (self._num_come + self._num_missed + weight)

    def forget(self) -> None:
        """What is known counts less."""
        self._num_come, self._num_missed = KEPT * self._num_come, KEPT * self._num_missed

    def num_worth_it(self, num_matching: int, least_probability: float, most: int) -> int:
        """How many candidates in a row come with at least this probability, the last one too."""
        return num_in_a_row(self.probability(num_matching), least_probability, most)


def num_in_a_row(each: float, least_probability: float, most: int) -> int:
    """How many candidates come with at least this probability, the last one too, where each comes with its own behind
    those before it."""
    if each < least_probability:
        return 0
    if least_probability <= 0 or each >= 1:
        return most
    return min(most, int(math.log(least_probability) / math.log(each) + 1e-9))


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


class _DraftText:
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
        self, node_requests: NodeRequests, model: DraftModel, gate: Gate, num_candidates: int, most_rows: int
    ) -> None:
        self._node_requests = node_requests
        self._model = model
        self._allocator = BlockAllocator(model.num_blocks, caching=False)
        self._gate = gate
        self._budget = Budget()
        self._num_candidates = num_candidates
        self._most_rows = most_rows
        self._texts: dict[NodeRequest, _DraftText | None] = {}  # None: it goes without
        self._record = Record()  # of all answers
        self._num_plain = 0  # steps without candidates
        self._running: list[tuple[NodeRequest, _DraftText]] = []
        self._num_answers = 0  # of the step to come
        self._is_stopped = False

    def plan(self) -> list[DraftWork]:
        """What is to be computed before the next step, which no step runs beside. `drafted` or `failed` is to follow,
        unless it is nothing."""
        self._let_go()
        self._num_answers = num_answers = self._node_requests.count(Stage.WRITING)
        if not num_answers or self._node_requests.count(Stage.READING) or not self.may_open(num_answers):
            return []
        least_probability = self._least_probability(num_answers)
        works: list[DraftWork] = []
        num_to_read, room = MOST_READ, self._most_rows - num_answers
        for node_request in self._node_requests.in_stage(Stage.WRITING):
            work = self._work(node_request, least_probability, num_to_read, room)
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
        for (node_request, text), work, written in zip(self._running, works, candidates, strict=True):
            text.num_computed += work.share.num_tokens
            text.num_tokens, text.written = text.num_computed, written
            assert not written or text.num_tokens <= len(node_request.request.token_ids)
        self._running = []

    def failed(self) -> None:
        """What was planned gave nothing: there is nothing more to come of this model."""
        self._is_stopped = True
        self._running = []

    def opens(self, num_answers: int) -> bool:
        """Whether there may be candidates in the next step. What was written was worth it."""
        return any(text is not None and text.written for text in self._texts.values())

    def candidates(self, node_request: NodeRequest, most: int) -> list[int]:
        """What was written behind the text as it is."""
        text = self._texts.get(node_request)
        is_of_now = text is not None and text.num_tokens == len(node_request.request.token_ids)
        return text.written[:most] if text is not None and is_of_now else []

    def came(self, node_request: NodeRequest, num_candidates: int, num_come: int) -> None:
        """Of its candidates the first so many have come."""
        self._record.add(num_candidates, num_come)
        if (text := self._texts.get(node_request)) is not None:
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
        for node_request in [each for each in self._texts if each not in self._node_requests]:
            text = self._texts.pop(node_request)
            if text is not None:
                text.lease.release()

    def _work(
        self, node_request: NodeRequest, least_probability: float, num_to_read: int, room: int
    ) -> DraftWork | None:
        request = node_request.request
        most = min(room, self._num_candidates, request.sampling.max_tokens - request.num_output_tokens - 1)
        if node_request.move is not None or node_request.hosts or node_request.is_ending:
            return None  # it has no candidates
        if most <= 0 or node_request.num_to_compute != 1:
            return None
        most = num_in_a_row(self._probability(node_request), least_probability, most)
        text = self._text(node_request, len(request.token_ids) + most) if most else None
        if text is None:
            return None
        text.follow(request.token_ids)
        num_missing = len(request.token_ids) - text.num_computed
        num_tokens = num_missing if num_missing <= FEW else min(num_missing, num_to_read)
        if not num_tokens:
            return None
        start, is_all = text.num_computed, num_tokens == num_missing
        share = Share(request.token_ids[start : start + num_tokens], start, text.lease.block_ids, samples=is_all)
        self._running.append((node_request, text))
        return DraftWork(share, most if is_all else 0)

    def _probability(self, node_request: NodeRequest) -> float:
        """That a candidate of it comes."""
        of_all, text = self._record.expected(FIRST_PROBABILITY, WEIGHT), self._texts.get(node_request)
        return of_all if text is None else text.record.expected(of_all, WEIGHT)

    def _text(self, node_request: NodeRequest, num_tokens: int) -> _DraftText | None:
        """With blocks for so many tokens. One that begins gets them for all of its text or has to wait, and one that
        finds none on its way goes without from then on: else several would take them from one another for ever."""
        text = self._texts.get(node_request)
        if text is None and node_request in self._texts:
            return None
        num_held = 0 if text is None else len(text.lease.block_ids)
        num_missing = -(-num_tokens // self._model.block_size) - num_held
        if num_tokens > self._model.max_model_len or num_missing > self._allocator.num_free:
            if text is not None:
                text.lease.release()
                self._texts[node_request] = None
            return None
        if text is None:
            text = self._texts[node_request] = _DraftText(self._allocator.allocate(num_missing))
        elif num_missing > 0:
            text.lease.grow(num_missing)
        return text


def _num_read(work: DraftWork) -> int:
    """Tokens of a text that it did not know, beside those that every answer gets."""
    return work.share.num_tokens if work.share.num_tokens > FEW else 0


MOST_ROWS: Final = 64  # tokens of a step with candidates
MOST_TAKEN_IN: Final = 1024  # tokens of a text in one step


class Source(Protocol):
    """Where candidates come from."""

    def opens(self, num_answers: int) -> bool:
        """Whether a step of so many answers may have some."""

    def may_open(self, num_answers: int) -> bool:
        """Whether the one behind a step of so many answers may, as far as can be told while that one runs."""

    def candidates(self, node_request: NodeRequest, most: int) -> list[int]:
        """Of one answer, as many as are worth their time, and no more than this."""

    def came(self, node_request: NodeRequest, num_candidates: int, num_come: int) -> None:
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

    def candidates(self, node_request: NodeRequest, most: int) -> list[int]:
        if node_request.draft is None:
            node_request.draft = _Text()
        text, token_ids = node_request.draft, node_request.request.token_ids
        if not text.lookup.take_in(token_ids, MOST_TAKEN_IN):
            return []
        place, num_matching = text.lookup.find(token_ids)
        most = text.record.num_worth_it(num_matching, self._least_probability, most) if num_matching else 0
        return following(token_ids, place, most)

    def came(self, node_request: NodeRequest, num_candidates: int, num_come: int) -> None:
        node_request.draft.record.add(num_candidates, num_come)

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
        node_requests: NodeRequests,
        leases: Leases,
        eos_token_ids: Sequence[int],
        num_candidates: int,
        most_tokens: int,
        draft_model: DraftModel | None,
    ) -> None:
        """`num_candidates` is the most for an answer in a step, `most_tokens` that of a whole step; 0 candidates:
        never any. A model with a `draft_model` writes them, or else they are looked up."""
        self._node_requests = node_requests
        self._leases = leases
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_candidates = num_candidates
        self._most_rows = min(MOST_ROWS, most_tokens)
        self._gate = Gate()
        self.drafts: Drafts | None = None
        if draft_model is not None and num_candidates:
            self.drafts = Drafts(node_requests, draft_model, self._gate, num_candidates, self._most_rows)
        self._source: Source = self.drafts or Lookups(self._gate)
        self.counts = SpeculationCounts()

    def extend(self, works: list[Work]) -> list[Work]:
        """A planned step, with candidates where they are worth their time."""
        if not self._num_candidates or self._node_requests.count(Stage.READING) or not self._source.opens(len(works)):
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
            self._source.came(self._node_requests.of(work.request), len(work.candidates), num_given - 1)
        counts.num_proposed += num_proposed
        counts.num_accepted += num_accepted
        self._gate.took(len(works), num_proposed, step_s)
        self._source.took(len(works), num_proposed, num_accepted, step_s)

    def _candidates(self, work: Work, room: int) -> list[int]:
        """Of one answer, at most `room`."""
        node_request, request = self._node_requests.of(work.request), work.request
        most = min(room, self._num_candidates, request.sampling.max_tokens - request.num_output_tokens - 1)
        if most <= 0 or work.num_tokens != 1 or node_request.move is not None or node_request.hosts:
            return []
        candidates = self._source.candidates(node_request, most)
        if candidates:
            candidates = candidates[: self._num_held(node_request, len(candidates))]
        return self._before_end(candidates, request.sampling.stop_token_ids)

    def _num_held(self, node_request: NodeRequest, num_candidates: int) -> int:
        """How many of so many candidates it has blocks for. It gets more where every request could have one all the
        same."""
        num_tokens = node_request.num_computed + 1
        num_missing = self._leases.num_missing(node_request, num_tokens + num_candidates)
        if num_missing and self._leases.num_free >= num_missing + len(self._node_requests):
            self._leases.grow(node_request, num_missing)
        assert node_request.lease is not None
        return len(node_request.lease.block_ids) * self._leases.block_size - num_tokens

    def _before_end(self, token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
        """Those before the first that may end the answer: nothing can be computed behind that."""
        for index, token_id in enumerate(token_ids):
            if token_id in self._eos_token_ids or token_id in stop_token_ids:
                return token_ids[:index]
        return token_ids
