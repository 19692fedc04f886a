"""What is asked in every history, and where the answers of two histories first differ."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from splitserve.client.answers import Completion, TokenLogprob
from splitserve.client.questions import Sampling
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import SEED

NUM_TOP: Final = 4  # likeliest tokens whose log-probabilities are compared, beside the answer's own
TURN_TOKENS: Final = 23  # new text of a second turn
# Whatever the model's folder recommends: every token can be drawn, so that the least bit may show.
OPEN: Final = Sampling(top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, ignore_eos=True, logprobs=NUM_TOP)


@dataclass(frozen=True, slots=True)
class BitsBench:
    """How much is asked, in tokens, and of which nodes. Lengths that the model's context does not hold are left out."""

    num_questions: int = 8
    prompt_tokens: tuple[int, ...] = (5, 130, 40, 600, 17, 290)  # that prompts have in turn
    output_tokens: tuple[int, int] = (16, 32)  # least and most of an answer
    cores: int = 1  # of each rank, as far as there are enough
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class Question:
    """One request; without a seed it is greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    @property
    def sampling(self) -> Sampling:
        how = Sampling(temperature=0.0) if self.seed is None else Sampling(temperature=0.9, seed=self.seed)
        return Sampling(**OPEN, **how, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """What can be seen of an answer's bits, and how it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two histories differ: token `token` of the answer to question `question`, both from 0."""

    question: int
    token: int
    is_token: bool  # or its log-probabilities alone


def draw_questions(sizes: BitsBench, vocab_size: int, max_model_len: int) -> list[Question]:
    """The same ones each time: half of them greedy, half sampled. Raises BenchError when the context holds none."""
    random, (least, most) = Random(SEED), sizes.output_tokens
    lengths = [each for each in sizes.prompt_tokens if each + 2 * most + TURN_TOKENS <= max_model_len]
    if not lengths:
        raise BenchError(f"a context of {max_model_len} tokens is too short for the prompts and answers of this check")
    return [
        Question(
            tuple(random.choices(range(vocab_size), k=length)),
            random.randint(least, most),
            None if index % 4 < 2 else SEED + index,
        )
        for index, length in zip(range(sizes.num_questions), itertools.cycle(lengths), strict=False)
    ]


def second_turns(questions: Sequence[Question], answers: Sequence[Answer], vocab_size: int) -> list[Question]:
    """What a user asks who has read these answers."""
    random = Random(SEED + 1)
    return [
        Question(
            (*question.prompt, *answer.token_ids, *random.choices(range(vocab_size), k=TURN_TOKENS)),
            question.max_tokens,
            question.seed,
        )
        for question, answer in zip(questions, answers, strict=True)
    ]


def short_ones(questions: Sequence[Question]) -> list[int]:
    """The shorter half of the questions, by their numbers."""
    by_length = sorted(range(len(questions)), key=lambda index: len(questions[index].prompt))
    return by_length[: (len(questions) + 1) // 2]


def first_difference(expected: Sequence[Answer], found: Sequence[Answer]) -> Difference | None:
    """Between the answers to the same questions, in order. Floats are equal when their bits are."""
    for question, (one, other) in enumerate(zip(expected, found, strict=True)):
        for token, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
            if ours != theirs:
                return Difference(question, token, ours.token_id != theirs.token_id)
        if one.token_ids != other.token_ids:  # of other lengths
            return Difference(question, min(len(one.token_ids), len(other.token_ids)), is_token=True)
    return None
