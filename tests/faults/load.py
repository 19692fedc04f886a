"""Clients that ask questions whose answers are known, and what they heard."""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos import inference_pb2
from tests.system.answers import Answer, Stream, outcome, request, stream
from tests.system.oracle import fake_answer

ANSWER_DEADLINE_S = 240.0
PAUSE_S = 0.2  # of a client that got no answer


@dataclass(frozen=True)
class Tokens:
    """What was wrong with the tokens of answers, in numbers of tokens."""

    lost: int = 0
    doubled: int = 0
    wrong: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(self.lost + other.lost, self.doubled + other.doubled, self.wrong + other.wrong)


def judge(pieces: Iterable[tuple[int, Sequence[int]]], expected: Sequence[int], *, is_whole: bool) -> Tokens:
    """Pieces of an answer, each with the index of its first token, beside the right answer. What has no end may stop
    anywhere, and has no gaps before."""
    told = [(first + place, token) for first, tokens in pieces for place, token in enumerate(tokens)]
    indexes = {index for index, _ in told}
    length = len(expected) if is_whole else max(indexes, default=-1) + 1
    return Tokens(
        lost=len(set(range(length)) - indexes),
        doubled=len(told) - len(indexes),
        wrong=sum(index >= len(expected) or expected[index] != token for index, token in told),
    )


class Heard(Answer):
    """Keeps what came, whatever the rules are."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[int, list[int]]] = []

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        self.request_id = response.request_id
        if response.HasField("complete"):
            self.complete = response.complete
        else:
            self.pieces.append((response.chunk.first_token_index, list(response.chunk.token_ids)))
            self.token_ids += response.chunk.token_ids


@dataclass
class Asked:
    """One question and its answer."""

    prompt: list[int]
    max_tokens: int
    stream: Stream
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> Tokens:
        heard = self.stream.answer
        expected = fake_answer(self.prompt, self.max_tokens)
        return judge(heard.pieces, expected, is_whole=heard.complete is not None)

    @property
    def outcome(self) -> str:
        return outcome(self.stream)

    @property
    def is_right(self) -> bool:
        """Whether it has ended well."""
        return self.stream.has_ended and self.outcome == "LENGTH" and self.tokens == Tokens()

    def has_gone_on_since(self, at: float) -> bool:
        """Whether anything of it has come later, or it has ended."""
        return self.stream.has_ended or any(arrival > at for arrival in self.stream.arrivals[-1:])


@dataclass(frozen=True)
class Habits:
    """How many clients there are, and what they ask."""

    num_clients: int = 8
    lengths: tuple[int, ...] = (5, 60, 300)
    max_tokens: tuple[int, ...] = (4, 30, 80)
    num_turns: int = 1  # of a chat, each of which asks with all that was said before


class Load:
    """Clients, each of which asks one question after the other until `stop`. Several loads may share the list of what
    is asked."""

    def __init__(self, stub: Any, habits: Habits, asked: list[Asked] | None = None) -> None:
        self.asked: list[Asked] = [] if asked is None else asked
        self._stub = stub
        self._habits = habits
        self._is_over = False

    def ask(self, prompt: Sequence[int], max_tokens: int, **call: Any) -> Asked:
        """Asks beside the clients."""
        message = request(list(prompt), max_tokens=max_tokens, temperature=0, ignore_eos=True)
        answering = stream(self._stub, message, make_answer=Heard, wait_for_ready=True, **call)
        self.asked.append(Asked(list(prompt), max_tokens, answering))
        return self.asked[-1]

    async def run(self, seed: int = 0) -> None:
        """Until `stop`, and then until every answer has ended."""
        numbers = range(self._habits.num_clients)
        await asyncio.gather(*[self._client(random.Random(1000 * seed + number)) for number in numbers])

    def stop(self) -> None:
        self._is_over = True

    async def in_swing(self) -> None:
        """Returns when every client has heard something."""
        while sum(bool(asked.stream.arrivals) for asked in self.asked) < self._habits.num_clients:
            await asyncio.sleep(0.02)

    async def _client(self, rng: random.Random) -> None:
        while not self._is_over:
            await self._chat(rng)

    async def _chat(self, rng: random.Random) -> None:
        """One question, and the others of its chat."""
        said: list[int] = []
        for _ in range(self._habits.num_turns):
            said += [rng.randrange(256) for _ in range(rng.choice(self._habits.lengths))]
            asked = self.ask(said, rng.choice(self._habits.max_tokens))
            await asked.stream.end(ANSWER_DEADLINE_S)
            if asked.stream.error is not None:
                await asyncio.sleep(PAUSE_S)
                return
            if self._is_over:
                return
            said += asked.stream.answer.token_ids
