"""Choose the draft tokens that a step verifies (speculative decoding). No I/O, no clock.

Prompt lookup: the last tokens of a text are searched among the tokens before, by chains of positions with the same
hash, as LZ77 compressors do. The longest match wins, of equal matches the latest. If the continuation of the match
reaches the end of the text, it continues with itself, so that repetitions are continued.

A step with a number of sequences takes a certain time, and each draft token adds a share of it; both are measured for
each power of two of sequences. An accepted draft token saves the time of one token without drafts. So a draft token
must be accepted with a probability of at least

seconds of a draft token / (seconds of a step / sequences)

and a small margin. On hardware with idle arithmetic units that is little for few sequences, and above 1 for many: then
there are no draft tokens.

A draft model also takes time to write draft tokens, measured separately. The time for attempts that may never pay off
is bounded by a budget. The draft model runs between two steps. It first reads unknown text, of a sequence that begins
or migrates here, in small chunks, and drafts only then. KV behind rejected draft tokens is overwritten: a text counts
as computed up to the last accepted draft token.

Output does not change: the engine samples each token as without drafts, and continues with the next one where it has
computed it. So this module decides about time alone. Steps with prompt chunks have no draft tokens, nor have migrating
sequences. Blocks for draft tokens are taken only where no request lacks them, and are the blocks that the sequence
needs next.
"""

import math
import statistics
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests, RequestState
from serving_core.requests import DraftWork, Share, Work

SHORTEST: Final = 3  # matching tokens; fewer predict little
LONGEST: Final = 32  # a longer match predicts no better
MOST_TRIED: Final = 6  # positions
NUM_CHAINS: Final = 2**14  # 64 KiB for a text, and 4 bytes for each token
NOWHERE: Final = -1
_FACTORS: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class Lookup:
    """An index of the tokens of one text, which only grows."""

    def __init__(self) -> None:
        self._last = array("i", (NOWHERE,)) * NUM_CHAINS  # latest position of each chain
        self._before: array[int] = array("i")  # for each position, the one before it in its chain

    def index(self, token_ids: Sequence[int], most_tokens: int) -> bool:
        """Index the next tokens of the text, at most `most_tokens`; return whether the whole text is indexed.

        `token_ids` is the whole text, which begins with what was indexed before.
        """
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
        """Return the position whose tokens best match the end of an indexed text, and how many tokens match.

        `token_ids` is the whole text. The position is that of the last matching token; (-1, 0) without a match of
        SHORTEST tokens.
        """
        found, longest = NOWHERE, SHORTEST - 1
        for place, length in self.places(token_ids):
            if length > longest:
                found, longest = place, length
            if longest == LONGEST:
                break
        return (found, longest) if found != NOWHERE else (NOWHERE, 0)

    def places(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield positions of last tokens that may match the end of an indexed text, latest first.

        `token_ids` is the whole text. Each position comes with the number of matching tokens, perhaps 0; at most
        MOST_TRIED positions.
        """
        end = len(token_ids) - 1
        place = self._before[end] if end >= 0 else NOWHERE
        for _ in range(MOST_TRIED):
            if place == NOWHERE:
                return
            yield place, _matching(token_ids, place, end)
            place = self._before[place]


def following(token_ids: Sequence[int], place: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens that continue the text `token_ids` as it continued behind position `place`.

    At the end of the text they continue with themselves.
    """
    period = len(token_ids) - 1 - place
    return [token_ids[place + 1 + index % period] for index in range(num_tokens)]


def _matching(token_ids: Sequence[int], place: int, end: int) -> int:
    """Return how many tokens up to the two positions are equal, at most LONGEST."""
    most = min(LONGEST, place + 1)
    for length in range(most):
        if token_ids[place - length] != token_ids[end - length]:
            return length
    return most


MARGIN: Final = 1.15  # factor by which a draft token must gain more than it costs
NUM_RECENT: Final = 16  # steps of each kind in a median
LEAST_STEPS: Final = 4  # without draft tokens, before the first draft
FIRST_SHARE: Final = 0.5  # cost of a draft token in token times, before it is measured
FORGET_STEPS: Final = 32  # without draft tokens, after which one measured step with drafts is dropped
KEPT: Final = 0.9  # decay of a sequence's acceptance counts for each step with drafts
BUDGET_SHARE: Final = 0.02  # share of step time that a draft model may lose
BUDGET_S: Final = 0.25  # initial budget of a draft model, and its limit without gains
MOST_GAINED_S: Final = 5.0  # limit of the budget with gains


class _Size:
    """Hold the measurements of steps with about the same number of sequences."""

    def __init__(self) -> None:
        self.plain_s: deque[float] = deque(maxlen=NUM_RECENT)
        self.shares: deque[float] = deque(maxlen=NUM_RECENT)  # share of a plain step that one draft token takes
        self.draft_shares: deque[float] = deque(maxlen=NUM_RECENT)  # share that the draft model takes to write it
        self.num_plain = 0


class DraftCosts:
    """Measures decode steps of one node with and without draft tokens, to tell which drafts are worth their time."""

    def __init__(self) -> None:
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)  # by the bit length of the number of sequences

    def record_step(self, num_sequences: int, num_draft_tokens: int, step_s: float) -> None:
        """Record that a decode step of these numbers of sequences and draft tokens took `step_s` seconds."""
        size = self._sizes[num_sequences.bit_length()]
        if not num_draft_tokens:
            size.plain_s.append(step_s)
            size.num_plain += 1
            if size.num_plain % FORGET_STEPS == 0:
                for shares in filter(None, (size.shares, size.draft_shares)):
                    shares.popleft()
        elif size.plain_s:
            plain_s = statistics.median(size.plain_s)
            size.shares.append(max(0.0, step_s / plain_s - 1) / num_draft_tokens)

    def drafted(self, num_sequences: int, num_draft_tokens: int, draft_s: float) -> None:
        """Record that a draft model took `draft_s` seconds to write `num_draft_tokens` draft tokens.

        They were for a step of num_sequences sequences.
        """
        size = self._sizes[num_sequences.bit_length()]
        if size.plain_s:
            size.draft_shares.append(draft_s / statistics.median(size.plain_s) / num_draft_tokens)

    def plain_s(self, num_sequences: int) -> float:
        """Return the median seconds of a step of about `num_sequences` sequences without draft tokens; 0 if unknown."""
        size = self._sizes[num_sequences.bit_length()]
        return statistics.median(size.plain_s) if size.plain_s else 0.0

    def least_probability(self, num_sequences: int) -> float:
        """Return the acceptance probability from which a draft token is worth its time.

        It holds for a step of `num_sequences` sequences. inf before LEAST_STEPS steps are measured; FIRST_SHARE before
        one with draft tokens is.
        """
        size = self._sizes[num_sequences.bit_length()]
        if len(size.plain_s) < LEAST_STEPS:
            return math.inf
        if not size.shares:
            return FIRST_SHARE
        return MARGIN * num_sequences * statistics.median(size.shares)

    def least_probability_of_drafts(self, num_sequences: int, step_s: float) -> float:
        """Return the acceptance probability from which a token that a draft model has yet to write is worth its time.

        It holds for a step of num_sequences sequences. `step_s` is the draft model's seconds for one token, used before
        a measurement. inf before LEAST_STEPS steps are measured.
        """
        size, wider = self._sizes[num_sequences.bit_length()], self.least_probability(num_sequences)
        if wider == math.inf:
            return wider
        known = [num_sequences * share for share in size.draft_shares] or [step_s / statistics.median(size.plain_s)]
        drafted = MARGIN * statistics.median(known)
        return wider + drafted if size.shares else max(wider, drafted)


class Budget:
    """The seconds that a draft model may still lose.

    It earns a share of the time of steps, and what its drafts gain.
    """

    def __init__(self) -> None:
        self._left_s = BUDGET_S

    @property
    def is_open(self) -> bool:
        """Return whether any budget is left."""
        return self._left_s > 0

    def add(self, gained_s: float) -> None:
        """Add gained seconds to the budget; negative values are losses."""
        self._left_s = min(MOST_GAINED_S, self._left_s + gained_s)

    def record_step(self, step_s: float) -> None:
        """Add the share that a step of `step_s` seconds without draft tokens earns."""
        if self._left_s < BUDGET_S:
            self._left_s = min(BUDGET_S, self._left_s + BUDGET_SHARE * step_s)


class Record:
    """Estimates the acceptance rate of one sequence's draft tokens."""

    def __init__(self) -> None:
        self._num_accepted = self._num_missed = 0.0  # decayed counts

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` of `num_draft_tokens` draft tokens were accepted."""
        self._num_accepted = KEPT * self._num_accepted + num_accepted
        self._num_missed = KEPT * self._num_missed + (num_accepted < num_draft_tokens)

    def probability(self, num_matching: int) -> float:
        """Return the probability that the next draft token is accepted behind a match of `num_matching` tokens.

        A longer match is likelier to continue and weighs more against the record.
        """
        return self.expected(num_matching / (num_matching + 2), num_matching / 2)

    def expected(self, probability: float, weight: float) -> float:
        """Return the acceptance probability, given a prior that weighs as much as `weight` draft tokens."""
        return (self._num_accepted + weight * probability) / (self._num_accepted + self._num_missed + weight)

    def forget(self) -> None:
        """Reduce the weight of what is recorded."""
        self._num_accepted, self._num_missed = KEPT * self._num_accepted, KEPT * self._num_missed

    def num_worth_it(self, num_matching: int, least_probability: float, most: int) -> int:
        """Return how many draft tokens, at most `most`, are all accepted with probability `least_probability` or more.

        They follow a match of `num_matching` tokens.
        """
        return num_in_a_row(self.probability(num_matching), least_probability, most)


def num_in_a_row(each: float, least_probability: float, most: int) -> int:
    """Return how many draft tokens, at most `most`, are all accepted with probability `least_probability` or more.

    `each` is the probability that one is accepted if those before it were.
    """
    if each < least_probability:
        return 0
    if least_probability <= 0 or each >= 1:
        return most
    return min(most, int(math.log(least_probability) / math.log(each) + 1e-9))


MOST_READ: Final = 64  # tokens of unknown text that are computed between two steps
FEW: Final = 2  # tokens that a sequence lags at most if all its draft tokens were accepted
FIRST_PROBABILITY: Final = 0.7  # acceptance probability before a measurement
WEIGHT: Final = 2  # of the rate of all sequences, in draft tokens


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The sizes and the speed of a draft model."""

    num_blocks: int
    block_size: int
    max_model_len: int
    step_s: float  # for one token of one sequence


class _DraftText:
    """Hold the state of one sequence in the draft model's pool."""

    def __init__(self, lease: BlockLease) -> None:
        self.lease = lease
        self.record = Record()
        self.num_computed = 0
        self.num_tokens = 0  # length of the text behind which `written` continues
        self.written: list[int] = []

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance to the current text.

        The KV of accepted draft tokens counts as computed, except for the last one.
        """
        for token_id, come in zip(self.written[:-1], token_ids[self.num_tokens :], strict=False):
            if token_id != come:
                break
            self.num_computed += 1
        self.written = []


class Drafts:
    """Plans which draft tokens the draft model of one node writes, and in which of its own blocks."""

    def __init__(
        self, node_requests: NodeRequests, model: DraftModel, costs: DraftCosts, num_draft_tokens: int, most_rows: int
    ) -> None:
        self._node_requests = node_requests
        self._model = model
        self._allocator = BlockAllocator(model.num_blocks, caching=False)
        self._costs = costs
        self._budget = Budget()
        self._num_draft_tokens = num_draft_tokens
        self._most_rows = most_rows
        self._texts: dict[NodeRequest, _DraftText | None] = {}  # None: no drafts for this sequence
        self._record = Record()  # of all sequences
        self._num_plain = 0  # steps without draft tokens
        self._running: list[tuple[NodeRequest, _DraftText]] = []
        self._num_sequences = 0  # of the next step
        self._is_stopped = False

    def plan(self) -> list[DraftWork]:
        """Return the works of the draft model before the next step of the node; empty if it writes nothing.

        No step may run meanwhile. The caller must call `drafted` or `failed` afterwards, unless the list is empty.
        """
        self._let_go()
        self._num_sequences = num_sequences = self._node_requests.count(RequestState.RUNNING)
        if (
            not num_sequences
            or self._node_requests.count(RequestState.PREFILLING)
            or not self.may_draft_next(num_sequences)
        ):
            return []
        least_probability = self._least_probability(num_sequences)
        works: list[DraftWork] = []
        num_to_read, room = MOST_READ, self._most_rows - num_sequences
        for node_request in self._node_requests.in_state(RequestState.RUNNING):
            work = self._work(node_request, least_probability, num_to_read, room)
            if work is not None:
                works.append(work)
                num_to_read -= _num_read(work)
                room -= work.num_draft_tokens
        return works

    def may_draft_next(self, num_sequences: int) -> bool:
        """Return whether the draft model may run between two steps of `num_sequences` sequences.

        It must not have failed, must have budget left, and its draft tokens must be worth their time.
        """
        return not self._is_stopped and self._budget.is_open and self._least_probability(num_sequences) < 1

    def drafted(self, works: Sequence[DraftWork], draft_tokens: Sequence[list[int]], draft_s: float) -> None:
        """Record the draft tokens that the planned works gave, and the `draft_s` seconds that they took."""
        num_read, num_draft_tokens = sum(map(_num_read, works)), sum(map(len, draft_tokens))
        self._budget.add(-draft_s)
        if num_draft_tokens and not num_read:
            self._costs.drafted(self._num_sequences, num_draft_tokens, draft_s)
        for (node_request, text), work, written in zip(self._running, works, draft_tokens, strict=True):
            text.num_computed += work.share.num_tokens
            text.num_tokens, text.written = text.num_computed, written
            assert not written or text.num_tokens <= len(node_request.request.token_ids)
        self._running = []

    def failed(self) -> None:
        """Stop the draft model for good, after its failure."""
        self._is_stopped = True
        self._running = []

    def may_draft(self, num_sequences: int) -> bool:
        """Return whether draft tokens were written for the next step, whatever its number of sequences."""
        return any(text is not None and text.written for text in self._texts.values())

    def draft_tokens(self, node_request: NodeRequest, most: int) -> list[int]:
        """Return at most `most` draft tokens behind the sequence's current tokens.

        None are returned if they were written behind earlier tokens.
        """
        text = self._texts.get(node_request)
        is_of_now = text is not None and text.num_tokens == len(node_request.request.token_ids)
        return text.written[:most] if text is not None and is_of_now else []

    def record_acceptance(self, node_request: NodeRequest, num_draft_tokens: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` of a sequence's draft tokens were accepted."""
        self._record.add(num_draft_tokens, num_accepted)
        if (text := self._texts.get(node_request)) is not None:
            text.record.add(num_draft_tokens, num_accepted)

    def record_step(self, num_sequences: int, num_draft_tokens: int, num_accepted: int, step_s: float) -> None:
        """Record a finished decode step of num_sequences sequences and `step_s` seconds.

        Without draft tokens the budget earns a share of the time; else it gains or loses the time that num_accepted
        accepted draft tokens saved or that the step took longer.
        """
        if num_draft_tokens:
            plain_s = self._costs.plain_s(num_sequences) or step_s
            self._budget.add(plain_s - step_s + num_accepted * plain_s / num_sequences)
            return
        self._budget.record_step(step_s)
        self._num_plain += 1
        if self._num_plain % FORGET_STEPS == 0:
            self._record.forget()

    @property
    def num_blocks(self) -> int:
        """Return how many of the draft model's blocks are in use."""
        return self._allocator.num_blocks - self._allocator.num_free

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block of the draft model is free or belongs to a sequence."""
        self._allocator.check_integrity()
        assert not self._allocator.num_leaked([text.lease for text in self._texts.values() if text is not None])

    def _least_probability(self, num_sequences: int) -> float:
        return self._costs.least_probability_of_drafts(num_sequences, self._model.step_s)

    def _let_go(self) -> None:
        """Release the texts of sequences that have left the node."""
        for node_request in [each for each in self._texts if each not in self._node_requests]:
            text = self._texts.pop(node_request)
            if text is not None:
                text.lease.release()

    def _work(
        self, node_request: NodeRequest, least_probability: float, num_to_read: int, room: int
    ) -> DraftWork | None:
        request = node_request.request
        most = min(room, self._num_draft_tokens, request.sampling.max_tokens - request.num_output_tokens - 1)
        if node_request.is_ending or not _may_draft(node_request):
            return None  # it has no draft tokens
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
        """Return the probability that a draft token of this sequence is accepted."""
        of_all, text = self._record.expected(FIRST_PROBABILITY, WEIGHT), self._texts.get(node_request)
        return of_all if text is None else text.record.expected(of_all, WEIGHT)

    def _text(self, node_request: NodeRequest, num_tokens: int) -> _DraftText | None:
        """Return the text of a sequence with blocks for `num_tokens` tokens, or None without enough blocks.

        A new sequence waits until all of its text fits. A sequence that finds no block later goes without drafts for
        good; otherwise sequences would take blocks from each other forever.
        """
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
    """Return the tokens of unknown text in a work item, beyond the few that every sequence gets."""
    return work.share.num_tokens if work.share.num_tokens > FEW else 0


MOST_ROWS: Final = 64  # tokens of a step with draft tokens
MOST_INDEXED: Final = 1024  # tokens of a text that are indexed in one step


class Source(Protocol):
    """A source of draft tokens: prompt lookup or a draft model."""

    def may_draft(self, num_sequences: int) -> bool:
        """Return whether a step of `num_sequences` sequences may have draft tokens. Call before `draft_tokens`."""

    def may_draft_next(self, num_sequences: int) -> bool:
        """Return whether the step behind a running one of num_sequences sequences may have draft tokens.

        As far as known while that one runs.
        """

    def draft_tokens(self, node_request: NodeRequest, most: int) -> list[int]:
        """Return at most `most` draft tokens of one sequence that are worth their time."""

    def record_acceptance(self, node_request: NodeRequest, num_draft_tokens: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` of a sequence's `num_draft_tokens` draft tokens were accepted."""

    def record_step(self, num_sequences: int, num_draft_tokens: int, num_accepted: int, step_s: float) -> None:
        """Record a finished step of these sequences, without prompts, that took `step_s` seconds.

        num_accepted of its num_draft_tokens draft tokens were accepted.
        """


class _Text:
    """Hold the index and the acceptance record of one sequence."""

    def __init__(self) -> None:
        self.lookup = Lookup()
        self.record = Record()


class Lookups:
    """A Source of draft tokens by prompt lookup."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._least_probability = 1.0
        self._texts: WeakKeyDictionary[NodeRequest, _Text] = WeakKeyDictionary()

    def may_draft(self, num_sequences: int) -> bool:
        self._least_probability = self._costs.least_probability(num_sequences)
        return self._least_probability < 1

    def may_draft_next(self, num_sequences: int) -> bool:
        return self._costs.least_probability(num_sequences) < 1

    def draft_tokens(self, node_request: NodeRequest, most: int) -> list[int]:
        text, token_ids = self._texts.setdefault(node_request, _Text()), node_request.request.token_ids
        if not text.lookup.index(token_ids, MOST_INDEXED):
            return []
        place, num_matching = text.lookup.find(token_ids)
        most = text.record.num_worth_it(num_matching, self._least_probability, most) if num_matching else 0
        return following(token_ids, place, most)

    def record_acceptance(self, node_request: NodeRequest, num_draft_tokens: int, num_accepted: int) -> None:
        self._texts[node_request].record.add(num_draft_tokens, num_accepted)

    def record_step(self, num_sequences: int, num_draft_tokens: int, num_accepted: int, step_s: float) -> None:
        """Do nothing: the costs have the measurement of every step."""


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of draft tokens since the node's start."""

    num_drafts: int = 0  # scheduled sequences that had draft tokens
    num_proposed: int = 0  # draft tokens
    num_accepted: int = 0  # accepted draft tokens


class Speculation:
    """Adds draft tokens to the steps of one node."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        eos_token_ids: Sequence[int],
        num_draft_tokens: int,
        most_tokens: int,
        draft_model: DraftModel | None,
    ) -> None:
        """Create the speculation of a node.

        `num_draft_tokens` limits the draft tokens of a sequence in a step (0: none), `most_tokens` the tokens of a
        whole step. With a `draft_model` that model writes the draft tokens, otherwise prompt lookup does.
        """
        self._node_requests = node_requests
        self._leases = leases
        self._eos_token_ids = frozenset(eos_token_ids)
        self.is_on: Final = num_draft_tokens > 0  # otherwise the caller asks nothing further
        self._num_draft_tokens = num_draft_tokens
        self._most_rows = min(MOST_ROWS, most_tokens)
        self._costs = DraftCosts()
        self.drafts: Drafts | None = None
        if draft_model is not None and num_draft_tokens:
            self.drafts = Drafts(node_requests, draft_model, self._costs, num_draft_tokens, self._most_rows)
        self._source: Source = self.drafts or Lookups(self._costs)
        self.counts = SpeculationCounts()

    def extend(self, works: list[Work]) -> list[Work]:
        """Return the works of a planned step, with draft tokens where they are worth their time.

        A step with prompts is returned as it is.
        """
        if self._node_requests.count(RequestState.PREFILLING) or not self._source.may_draft(len(works)):
            return works
        extended, room = [], self._most_rows - len(works)
        for work in works:
            draft_tokens = self._draft_tokens(work, room)
            room -= len(draft_tokens)
            extended.append(work._replace(draft_tokens=draft_tokens) if draft_tokens else work)
        return extended

    def may_extend(self, num_sequences: int) -> bool:
        """Return whether the step behind a running one of `num_sequences` sequences may get draft tokens."""
        return self._source.may_draft_next(num_sequences)

    def record_step(self, works: Sequence[Work], nums_given: Sequence[int], step_s: float) -> None:
        """Record that a decode step gave `nums_given[i]` tokens to `works[i]` and took `step_s` seconds.

        Whether later steps get draft tokens depends on this.
        """
        counts, num_proposed, num_accepted = self.counts, 0, 0
        for work, num_given in zip(works, nums_given, strict=True):
            if not work.draft_tokens:
                continue
            counts.num_drafts += 1
            num_proposed += len(work.draft_tokens)
            num_accepted += num_given - 1
            self._source.record_acceptance(self._node_requests.of(work.request), len(work.draft_tokens), num_given - 1)
        counts.num_proposed += num_proposed
        counts.num_accepted += num_accepted
        self._costs.record_step(len(works), num_proposed, step_s)
        self._source.record_step(len(works), num_proposed, num_accepted, step_s)

    def _draft_tokens(self, work: Work, room: int) -> list[int]:
        """Return the draft tokens of one sequence, at most `room`."""
        node_request, request = self._node_requests.of(work.request), work.request
        most = min(room, self._num_draft_tokens, request.sampling.max_tokens - request.num_output_tokens - 1)
        if most <= 0 or work.num_tokens != 1 or not _may_draft(node_request):
            return []
        draft_tokens = self._source.draft_tokens(node_request, most)
        if draft_tokens:
            draft_tokens = draft_tokens[: self._num_held(node_request, len(draft_tokens))]
        return self._before_end(draft_tokens, request.sampling.stop_token_ids)

    def _num_held(self, node_request: NodeRequest, num_draft_tokens: int) -> int:
        """Return how many draft tokens have blocks.

        Takes more blocks only if one free block is left for every request.
        """
        num_tokens = node_request.num_computed + 1
        num_missing = self._leases.num_missing(node_request, num_tokens + num_draft_tokens)
        if num_missing and self._leases.num_free >= num_missing + len(self._node_requests):
            self._leases.grow(node_request, num_missing)
        assert node_request.lease is not None
        return len(node_request.lease.block_ids) * self._leases.block_size - num_tokens

    def _before_end(self, token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
        """Return the tokens before the first that may end the output; nothing can be computed behind it."""
        for index, token_id in enumerate(token_ids):
            if token_id in self._eos_token_ids or token_id in stop_token_ids:
                return token_ids[:index]
        return token_ids


def _may_draft(node_request: NodeRequest) -> bool:
    """Return whether a sequence may have draft tokens: all of its blocks are here, and stay."""
    return node_request.migration is None and node_request.distributed is None
