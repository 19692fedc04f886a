"""What things take in a simulation: the seconds of a profile, how they vary, and how nodes of one machine slow each
other down."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final, Protocol

from serving_core.node.costs import num_pairs
from serving_core.requests import Work
from splitserve_bench.simulate.profile import NO_SPREAD, Profile, Row, Spread, equal_shares

LEAST_STEP_S: Final = 1e-6  # a clock that stood still would never end
MOST_COSTS: Final = 64  # profiles whose costs are kept
START_TOKENS: Final = 256  # of the prompt whose speed a node knows when it starts


@dataclass(slots=True)
class StepLoad:
    """What a step computes: a token of each of so many answers with num_cached tokens before them in all, and chunks of
    prompts. One chunk of all their tokens, with num_before / num_prompt_tokens tokens before it, would have as many
    pairs of a token and one before it as they have: below 0 where they are several short ones. Before a step that
    `is_first` the node waited."""

    num_sequences: float = 0
    num_cached: float = 0
    num_prompt_tokens: int = 0
    num_before: float = 0.0
    is_first: bool = False


def load_of(works: Sequence[Work]) -> StepLoad:
    """Return what a step computes; a chunk of one token costs what a token of an answer does."""
    answers = [work.start for work in works if work.num_tokens == 1]
    load, pairs = StepLoad(len(answers), sum(answers)), 0.0
    if len(answers) < len(works):
        for work in works:
            if work.num_tokens > 1:
                load.num_prompt_tokens += work.num_tokens
                pairs += num_pairs(work.start, work.num_tokens)
        load.num_before = pairs - num_pairs(0, load.num_prompt_tokens)
    return load


class Costs(Protocol):
    """What one node's work takes, in seconds."""

    def step_s(self, load: StepLoad) -> float: ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """What a node knows of itself at start; 0: nothing."""
        ...

    def message_s(self, sent_s: float) -> float:
        """From the coordinator to a node, or back, of one that is sent at this moment."""
        ...

    def latency_s(self) -> float:
        """Of a transfer, beside its bytes."""
        ...

    def bytes_s(self, num_bytes: int) -> float:
        """Of so many bytes of KV on their way."""
        ...


class ProfileCosts:
    """The costs that a profile says, of a node beside another one at work, or of one that is alone on its machine."""

    def __init__(self, profile: Profile, *, is_alone: bool = False) -> None:
        self._steps, self._kv_transfer, self._control = profile.steps, profile.kv_transfer, profile.control
        self._answers_factor = profile.steps.answers_alone_factor if is_alone else 1.0
        self._prompts_factor = profile.steps.prompts_alone_factor if is_alone else 1.0
        self._answers: dict[float, Row] = {}  # by how many there are, of those that were asked for
        self._chunks: dict[float, Row] = {}  # by their tokens, likewise
        start_s = self._chunk_s(START_TOKENS, 0)
        self.prefill_tokens_per_s = START_TOKENS / max(LEAST_STEP_S, start_s)

    def step_s(self, load: StepLoad) -> float:
        seconds = self._steps.overhead_s + self._computed_s(load)
        if load.num_prompt_tokens and load.is_first:
            seconds += self._steps.prompt_overhead_s
        return max(LEAST_STEP_S, seconds)

    def message_s(self, sent_s: float) -> float:
        return self._control.message_s

    def latency_s(self) -> float:
        return self._kv_transfer.latency_s

    def bytes_s(self, num_bytes: int) -> float:
        return num_bytes / self._kv_transfer.bytes_per_s

    def _computed_s(self, load: StepLoad) -> float:
        num_sequences, num_chunk_tokens = load.num_sequences, load.num_prompt_tokens
        if num_sequences and num_chunk_tokens:
            return self._both_s(load)
        if num_sequences:
            return self._answers_s(num_sequences, load.num_cached / num_sequences)
        return self._chunk_s(num_chunk_tokens, load.num_before / num_chunk_tokens) if num_chunk_tokens else 0.0

    def _both_s(self, load: StepLoad) -> float:
        """A step of both computes the products of all its tokens at once, whosesoever they are: answers in it take what
        so many more tokens of prompts do, and what they do beyond that, which is more of the head, and their own
        attention."""
        num_sequences, num_tokens = load.num_sequences, load.num_sequences + load.num_prompt_tokens
        num_before = load.num_before + (load.num_prompt_tokens**2 - num_tokens**2) / 2
        fresh_s = self._answers_s(num_sequences, 0)
        head_s = max(0.0, fresh_s - self._chunk_s(num_sequences, 0))
        attention_s = self._answers_s(num_sequences, load.num_cached / num_sequences) - fresh_s
        chunk_s = self._chunk_s(num_tokens, num_before / num_tokens)
        return chunk_s + head_s + self._steps.attention_beside_factor * attention_s

    def _answers_s(self, num_sequences: float, context_tokens: float) -> float:
        """Return the seconds of a token for each of so many answers, with so many tokens before it."""
        row = self._answers.get(num_sequences)
        if row is None:
            row = self._answers[num_sequences] = self._steps.answers.row(num_sequences)
        return row.at(context_tokens) * self._answers_factor

    def _chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        """Return the seconds of so many tokens of prompts, with so many before them: as of one chunk, below 0 where it
        is several short ones (StepLoad.num_before). What was measured for one chunk alone says no less than without
        any before it."""
        row = self._chunks.get(num_tokens)
        if row is None:
            row = self._chunks[num_tokens] = self._steps.prompts.row(num_tokens)
        return row.at(before_tokens) * self._prompts_factor


@lru_cache(MOST_COSTS)
def costs_of(profile: Profile, *, is_alone: bool = False) -> ProfileCosts:
    """Return the costs of a profile, which are the same for all its nodes, with what was already looked up."""
    return ProfileCosts(profile, is_alone=is_alone)


class Draws:
    """Factors of a spread, one for each number from 0: the same whoever asks and how often."""

    def __init__(self, spread: Spread, seed: str) -> None:
        """Draws of spreads that differ and of one seed are large and small at the same numbers."""
        self._factors = list(equal_shares(spread))
        if len(self._factors) > 1:
            Random(seed).shuffle(self._factors)

    def factor(self, number: int) -> float:
        """What the step or the message of this number takes, as a multiple of what the profile says."""
        return self._factors[number % len(self._factors)]


class Noise:
    """Of one node: its steps, and the messages to it and from it."""

    def __init__(
        self,
        answers: Spread = NO_SPREAD,
        prompts: Spread = NO_SPREAD,
        messages: Spread = NO_SPREAD,
        seed: str = "",
    ) -> None:
        """Each node of a fleet needs a `seed` of its own."""
        self._answers, self._prompts = Draws(answers, seed), Draws(prompts, seed)
        self.commands, self.events = Draws(messages, f"{seed} commands"), Draws(messages, f"{seed} events")

    def step(self, number: int, load: StepLoad) -> float:
        """Return the factor of the node's step of this number: one with prompts spreads as they do."""
        return (self._prompts if load.num_prompt_tokens else self._answers).factor(number)


NO_NOISE: Final = Noise()
NO_DRAWS: Final = Draws(NO_SPREAD, "")


class Neighbour(Protocol):
    """A node, as its machine knows it."""

    costs: Costs  # beside another one at work

    def pace_changed(self) -> None:
        """To be told while a step of its own runs: another one has begun to work beside it, or rests."""
        ...


class Machine:
    """Nodes that share one. Those at work are counted, not weighed: that is what was measured."""

    def __init__(self, alone: Costs) -> None:
        """`alone`: of each node while no other one works."""
        self._alone = alone
        self._at_work: dict[Neighbour, None] = {}

    def costs(self, node: Neighbour) -> Costs:
        """Of this node's steps, as the others are now."""
        has_company = len(self._at_work) > (node in self._at_work)
        return node.costs if has_company else self._alone

    def works(self, node: Neighbour) -> None:
        """A step of it begins, after another one or a rest."""
        if node not in self._at_work:
            self._at_work[node] = None
            self._tell(node)

    def rests(self, node: Neighbour) -> None:
        """No step of it runs any more."""
        if node in self._at_work:
            del self._at_work[node]
            self._tell(node)

    def _tell(self, changed: Neighbour) -> None:
        for node in self._at_work:
            if node is not changed:
                node.pace_changed()


class Progress:
    """How far a step is whose rate may change. Pure."""

    def __init__(self, now: float, seconds: float) -> None:
        """One that begins now and takes so long."""
        self._since_s, self._left, self._seconds = now, 1.0, seconds

    @property
    def ends_s(self) -> float:
        """When, if it goes on like this."""
        return self._since_s + self._left * self._seconds

    def go_on(self, now: float, seconds: float) -> None:
        """From now on a whole step would take so long. What is over stays over."""
        if seconds != self._seconds and now < self.ends_s:
            self._left -= (now - self._since_s) / self._seconds
            self._since_s, self._seconds = now, seconds
