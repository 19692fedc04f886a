"""A request as the engine and the schedulers see it. Torch-free."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from serving_core.errors import RequestError

MEAN, LAST = "mean", "last"
POOLINGS: Final = (MEAN, LAST)
NO_TOKEN: Final = -1  # as a token id


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated by the coordinator; nodes take it as it is."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # no other token comes; empty: any
    bad_tokens: tuple[tuple[int, ...], ...] = ()  # runs of tokens, none of which comes in the answer
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; k: the sampled token's and the k most likely
    logprob_token_ids: tuple[int, ...] = ()  # with logprobs: these in place of the most likely
    prompt_logprobs: int | None = None  # the same of the prompt's tokens behind the first: its scores
    grammar: str = ""  # of what the answer is made to be, for serving_core/grammars.py; empty: anything


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states behind the last layer's norm, one for each token of a text, become its embedding."""

    kind: str  # one of POOLINGS: the mean of all, or that of the last token
    normalizes: bool = True  # to length 1
    num_dimensions: int = 0  # its leading numbers that are kept, before that; 0: all


OnLayer = Callable[[int], None]
"""Told now and then during a step, and after the last layer, how many of the leading layers have their KV in the pool.
Called in the engine's thread."""


class FinishReason(Enum):
    """Why an answer ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class Guide(Protocol):
    """Keeps one answer to its grammar. What it says depends on the grammar and the answer's tokens alone."""

    def allowed(self, output: Sequence[int]) -> bytes:
        """The tokens that may follow these, which begin with those of the call before: bit b of byte i is for token
        8 i + b, and what has no bit may not come. Raises RequestError when none may, or these are not of the
        grammar."""


@dataclass(slots=True, eq=False)
class Request:
    """One attempt at one answer: tokens so far (prompt, then output) and how to go on."""

    request_id: str
    epoch: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""  # KV is shared only between requests with the same salt
    scores: "list[SampledToken]" = field(default_factory=list)  # of the prompt, as far as it was read
    adapter: str = ""  # the LoRA adapter that computes it; empty: the model alone
    guide: Guide | None = None  # where its tokens are chosen and it has a grammar
    pooling: Pooling | None = None  # the answer is the embedding of the prompt; None: tokens
    pooled: Any = None  # the engine's own: of a mean, the sum so far
    annexes: Sequence[Any] = ()  # where its oldest blocks lie on other nodes (engine/attention/annexed.py)
    annex_error: str = ""  # why one of them is lost: what the step gave for the request means nothing

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Whether whoever reads the prompt is to score it. With a token out that has been done."""
        return self.sampling.prompt_logprobs is not None and not self.num_output_tokens

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Share:
    """What the model needs to know of one request's part in a step, also on a rank that does not know the request.

    token_ids are those to compute. The KV of `start` tokens before them is in the pool; block_ids covers all of them.
    `samples` tells whether what the model gives for the last token is wanted: its logits, or of an embedder its hidden
    state; that for the leading num_scored ones is too. `adapter` is the LoRA adapter that computes them; empty: the
    model alone.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool
    num_scored: int = 0
    adapter: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class DraftWork(NamedTuple):
    """What a draft model is to compute for one answer: a share of the text, and so many likely tokens behind it. Where
    there are any, block_ids covers them too."""

    share: Share
    num_candidates: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one Work that samples gives, or a token of a prompt with its score. Logprobs are natural logs of the model's
    own distribution, before penalties, bias and temperature (vLLM calls them raw), and like vLLM's over the tokens that
    a grammar allows."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: RequestError | None = None  # why there is no token: its grammar goes no further
    embedding: bytes = b""  # in place of a token: of the prompt, as float32, little-endian

    @property
    def is_token(self) -> bool:
        return self.error is None and not self.embedding


class Work(NamedTuple):
    """One request's share of a step: compute token_ids[start : start + num_tokens].

    The KV of token_ids[:start] is in the pool already; block_ids covers start + num_tokens tokens, and the candidates.
    A token is sampled when the share reaches the last known token. `candidates` may follow that one: each that does is
    followed by one more token of the same step. A tuple, which is made quickly: there is one for each answer in each
    step.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: Sequence[int]
    candidates: Sequence[int] = ()  # none of them ends the answer, or is its last one; none where a prompt is scored

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.request.token_ids)

    @property
    def num_scored(self) -> int:
        """Of its leading tokens, those whose logits score the token behind them, or whose hidden states are pooled
        beside that of its last one."""
        pooling = self.request.pooling
        if pooling is not None:
            return self.num_tokens - self.samples if pooling.kind == MEAN else 0
        if not self.request.is_scored:
            return 0
        return max(0, min(self.start + self.num_tokens, self.request.num_prompt_tokens - 1) - self.start)

    @property
    def share(self) -> Share:
        token_ids = self.request.token_ids[self.start : self.start + self.num_tokens]
        num_scored, adapter = self.num_scored, self.request.adapter
        if self.candidates:
            token_ids += self.candidates
            num_scored += len(self.candidates)
        return Share(token_ids, self.start, self.block_ids, self.samples, num_scored, adapter)

    def take(self, sampled: Iterator[SampledToken]) -> list[SampledToken]:
        """Its own of the tokens that a step gave, which come next: one if it samples, and one more behind each
        candidate that has come."""
        taken = [next(sampled)] if self.samples else []
        for candidate in self.candidates:
            if taken[-1].token_id != candidate:
                break
            taken.append(next(sampled))
        return taken


def finish_reason(request: Request, eos_token_ids: Sequence[int]) -> FinishReason | None:
    """Whether the last token of the request ends its answer. (Stop strings are the coordinator's business.)"""
    return _reason_of(request.sampling, request.token_ids[-1], request.num_output_tokens, eos_token_ids)


def would_end(request: Request, token_id: int, eos_token_ids: Sequence[int]) -> bool:
    """Whether this token, were it the next one of the request, would end its answer."""
    return _reason_of(request.sampling, token_id, request.num_output_tokens + 1, eos_token_ids) is not None


def _reason_of(
    sampling: SamplingParams, last: int, num_output_tokens: int, eos_token_ids: Sequence[int]
) -> FinishReason | None:
    if num_output_tokens >= sampling.min_tokens and (
        last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos)
    ):
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
