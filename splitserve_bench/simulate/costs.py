"""Say how long everything takes in a simulation: by a profile, with variation, and slower beside busy neighbors."""

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
    """What a step computes: a token of each of num_sequences requests, and num_prompt_tokens tokens of prompts.

    num_cached are the tokens before those of the requests, all together. A single chunk of all prompt tokens with
    num_before / num_prompt_tokens tokens before it would have as many pairs of a token and one before it as the chunks
    have; num_before is below 0 where they are several short ones. `is_first`: the node was idle before the step.
    """

    num_sequences: float = 0
    num_cached: float = 0
    num_prompt_tokens: int = 0
    num_before: float = 0.0
    is_first: bool = False


def load_of(works: Sequence[Work]) -> StepLoad:
    """Return what a step computes; a chunk of one token counts as a token of a decoding request."""
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
        """Return the prefill rate that the node assumes at its start; 0 for none."""
        ...

    def message_s(self, sent_s: float) -> float:
        """Return the seconds of a message from the coordinator to the node, or back, that is sent at this moment."""
        ...

    def latency_s(self) -> float:
        """Return the seconds of a KV transfer beside those of its bytes."""
        ...

    def bytes_s(self, num_bytes: int) -> float:
        """Return the seconds that so many bytes of KV take."""
        ...


class ProfileCosts:
    """The costs of a node by a profile: beside another node at work, or with `is_alone` without one."""

    def __init__(self, profile: Profile, *, is_alone: bool = False) -> None:
        self._steps, self._kv_transfer, self._control = profile.steps, profile.kv_transfer, profile.control
        self._answers_factor = profile.steps.answers_alone_factor if is_alone else 1.0
        self._prompts_factor = profile.steps.prompts_alone_factor if is_alone else 1.0
        self._answers: dict[float, Row] = {}  # by how many there are, as far as looked up
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
        """Return the seconds of a step with decoding requests and chunks of prompts.

        Such a step computes the products of all its tokens together: requests take what so many more prompt tokens
        would, and what their decode steps take beyond that: more of the head, and their own attention.
        """
        num_sequences, num_tokens = load.num_sequences, load.num_sequences + load.num_prompt_tokens
        num_before = load.num_before + (load.num_prompt_tokens**2 - num_tokens**2) / 2
        fresh_s = self._answers_s(num_sequences, 0)
        head_s = max(0.0, fresh_s - self._chunk_s(num_sequences, 0))
        attention_s = self._answers_s(num_sequences, load.num_cached / num_sequences) - fresh_s
        chunk_s = self._chunk_s(num_tokens, num_before / num_tokens)
        return chunk_s + head_s + self._steps.attention_beside_factor * attention_s

    def _answers_s(self, num_sequences: float, context_tokens: float) -> float:
        """Return the seconds of a decode step of so many requests, with so many tokens before each of theirs."""
        row = self._answers.get(num_sequences)
        if row is None:
            row = self._answers[num_sequences] = self._steps.answers.row(num_sequences)
        return row.at(context_tokens) * self._answers_factor

    def _chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        """Return the seconds of so many prompt tokens as one chunk, with so many tokens before it.

        That is below 0 for several short chunks (StepLoad.num_before), which cost no less than one without any before
        it.
        """
        row = self._chunks.get(num_tokens)
        if row is None:
            row = self._chunks[num_tokens] = self._steps.prompts.row(num_tokens)
        return row.at(before_tokens) * self._prompts_factor


@lru_cache(MOST_COSTS)
def costs_of(profile: Profile, *, is_alone: bool = False) -> ProfileCosts:
    """Return the costs of a profile, which are kept: the same for all its nodes, with what was already looked up."""
    return ProfileCosts(profile, is_alone=is_alone)


class Draws:
    """Factors of a spread, one for each number from 0: the same however often it is read."""

    def __init__(self, spread: Spread, seed: str) -> None:
        """Draw the factors by a seed.

        Different spreads with one seed have large and small factors at the same numbers.
        """
        self._factors = list(equal_shares(spread))
        if len(self._factors) > 1:
            Random(seed).shuffle(self._factors)

    def factor(self, number: int) -> float:
        """Return by what the profile's time is to be multiplied for the step or message of this number."""
        return self._factors[number % len(self._factors)]


class Noise:
    """The variation of one node's steps, and of the messages to it and from it."""

    def __init__(
        self,
        answers: Spread = NO_SPREAD,
        prompts: Spread = NO_SPREAD,
        messages: Spread = NO_SPREAD,
        seed: str = "",
    ) -> None:
        """Draw the factors. Each node of a fleet needs a `seed` of its own."""
        self._answers, self._prompts = Draws(answers, seed), Draws(prompts, seed)
        self.commands, self.events = Draws(messages, f"{seed} commands"), Draws(messages, f"{seed} events")

    def step(self, number: int, load: StepLoad) -> float:
        """Return the factor of the node's step of this number; a step with prompts varies as these do."""
        return (self._prompts if load.num_prompt_tokens else self._answers).factor(number)


NO_NOISE: Final = Noise()
NO_DRAWS: Final = Draws(NO_SPREAD, "")


class Neighbour(Protocol):
    """A node, as its machine knows it."""

    costs: Costs  # beside another one at work

    def pace_changed(self) -> None:
        """Reconsider the running step's end: another node of the machine has begun to work, or has become idle."""
        ...


class Machine:
    """Nodes that share a machine and slow each other down. Only how many are at work matters, as that was measured."""

    def __init__(self, alone: Costs) -> None:
        """`alone` are the costs of each node while no other one works."""
        self._alone = alone
        self._at_work: dict[Neighbour, None] = {}

    def costs(self, node: Neighbour) -> Costs:
        """Return the costs of this node's steps while the other nodes are as they are now."""
        has_company = len(self._at_work) > (node in self._at_work)
        return node.costs if has_company else self._alone

    def works(self, node: Neighbour) -> None:
        """Record that a step of the node begins, and notify the others if it was idle."""
        if node not in self._at_work:
            self._at_work[node] = None
            self._tell(node)

    def rests(self, node: Neighbour) -> None:
        """Record that the node runs no step any more, and notify the others."""
        if node in self._at_work:
            del self._at_work[node]
            self._tell(node)

    def _tell(self, changed: Neighbour) -> None:
        for node in self._at_work:
            if node is not changed:
                node.pace_changed()


class Progress:
    """How far a step is whose speed may change. Pure."""

    def __init__(self, now: float, seconds: float) -> None:
        """Begin a step now that takes `seconds`."""
        self._since_s, self._left, self._seconds = now, 1.0, seconds

    @property
    def ends_s(self) -> float:
        """Return the moment at which the step ends if its speed stays."""
        return self._since_s + self._left * self._seconds

    def go_on(self, now: float, seconds: float) -> None:
        """Change the speed from now on to one at which a whole step takes `seconds`; what is done stays done."""
        if seconds != self._seconds and now < self.ends_s:
            self._left -= (now - self._since_s) / self._seconds
            self._since_s, self._seconds = now, seconds
