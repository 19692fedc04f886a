"""Define a request as the engine and the schedulers see it. Torch-free."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from serving_core.errors import RequestError

MEAN, LAST = "mean", "last"
POOLINGS: Final = (MEAN, LAST)
LOGPROBS: Final = "logprobs"
NO_TOKEN: Final = -1  # token id of no token


SAMPLING_RANGES: Final = {  # of SamplingParams, both bounds included
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is sampled. Validated by the coordinator; nodes use the values unchanged."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # only these tokens are allowed; empty: any
    bad_tokens: tuple[tuple[int, ...], ...] = ()  # token sequences, none of which may occur in the output
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; k: the sampled token's and the k most likely
    logprob_token_ids: tuple[int, ...] = ()  # with logprobs: these tokens instead of the most likely ones
    prompt_logprobs: int | None = None  # the same for the prompt tokens behind the first: the prompt's scores
    grammar: str = ""  # of the output, in the form of serving_core/grammars.py; empty: anything


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a request that only prefills returns: an embedding or logprobs.

    An embedding is made of the hidden states behind the last layer's norm, one for each token of a text.
    """

    kind: str  # one of POOLINGS: the mean of all hidden states, or the last token's; or LOGPROBS of logprob_token_ids
    normalizes: bool = True  # to length 1
    num_dimensions: int = 0  # leading dimensions to keep, before normalization; 0: all


OnLayer = Callable[[int], None]
"""Receives, from time to time during a step and after the last layer, how many leading layers have their KV in the
pool. Called in the engine's thread.
"""


class FinishReason(Enum):
    """Why an output ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class Guide(Protocol):
    """Keep one output within its grammar. Results depend only on the grammar and the output's tokens."""

    def allowed(self, output: Sequence[int]) -> bytes:
        """Return the tokens that may follow `output`: bit b of byte i allows token 8 i + b; the others are forbidden.

        `output` must extend the output of the call before. Raises RequestError if no token is allowed, or if `output`
        violates the grammar.
        """


@dataclass(slots=True, eq=False)
class Request:
    """One attempt at one sequence: its tokens (prompt, then output) and how to continue."""

    request_id: str
    epoch: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""  # KV is shared only between requests with the same salt
    scores: "list[SampledToken]" = field(default_factory=list)  # of the prompt, as far as it was prefilled
    adapter: str = ""  # name of the LoRA adapter; empty: the model alone
    guide: Guide | None = None  # set where tokens are sampled and the request has a grammar
    pooling: Pooling | None = None  # the output is the embedding or logprobs of the prompt; None: tokens
    pooled: Any = None  # the engine's own state: the sum so far of a mean
    remote_kvs: Sequence[Any] = ()  # KV holders of its oldest blocks (engine/attention/distributed.py)
    remote_kv_error: str = ""  # why remote KV failed: the step's result for the request is invalid

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Return whether the prefill computes prompt scores. A request with an output token has them already."""
        return self.sampling.prompt_logprobs is not None and not self.num_output_tokens

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one request in a step, as the model needs it, also on a rank that does not know the request.

    The step computes `token_ids`. The pool holds the KV of the `start` tokens before them; `block_ids` covers all of
    these tokens. The step reads a fixed state from `state_ids`; if empty, from the leading blocks of `block_ids`, to
    which it writes the state. `samples` says whether the output for the last token is wanted (logits, or an embedder's
    hidden state); the outputs of the leading `num_scored` tokens are wanted as well. `adapter` is the name of a LoRA
    adapter; empty: the model alone.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool
    num_scored: int = 0
    adapter: str = ""
    state_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class DraftWork(NamedTuple):
    """The work of a draft model for one sequence: its share of a step, and the number of draft tokens to generate.

    `block_ids` of the share covers the draft tokens too.
    """

    share: Share
    num_draft_tokens: int


class SampledToken(NamedTuple):
    """The result of one Work that samples, or a prompt token with its score. A tuple, which is fast to create.

    Logprobs are natural logs of the model's own distribution, before penalties, bias and temperature (vLLM's raw
    logprobs), and like vLLM's over the tokens that a grammar allows.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: RequestError | None = None  # why there is no token, such as a grammar that allows none
    embedding: bytes = b""  # instead of a token: the prompt's embedding or logprobs, float32, little-endian


class Work(NamedTuple):
    """The part of one request in a step: compute token_ids[start : start + num_tokens].

    The pool holds the KV of token_ids[:start]; `block_ids` covers start + num_tokens tokens and the draft tokens. A
    token is sampled if the work reaches the last known token. Draft tokens (`draft_tokens`) may follow it: each
    accepted draft token yields one more token of the same step. A tuple, which is fast to create: a step creates one
    for each sequence.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: Sequence[int]
    # Draft tokens; none of them ends the output or is its last token; none where a prompt is scored
    draft_tokens: Sequence[int] = ()
    state_ids: Sequence[int] = ()  # as in Share

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.request.token_ids)

    @property
    def num_scored(self) -> int:
        """Return the number of the work's leading tokens whose logits, or hidden states, are wanted beside the last's.

        Logits score the next token of a prompt; hidden states are pooled into a mean.
        """
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
        if self.draft_tokens:
            token_ids += self.draft_tokens
            num_scored += len(self.draft_tokens)
        return Share(token_ids, self.start, self.block_ids, self.samples, num_scored, adapter, self.state_ids)

    def take(self, sampled: Iterator[SampledToken]) -> list[SampledToken]:
        """Take this work's tokens from `sampled`, the results of a step, and return them.

        One token if the work samples, and one more for each accepted draft token.
        """
        taken = [next(sampled)] if self.samples else []
        for draft_token in self.draft_tokens:
            if taken[-1].token_id != draft_token:
                break
            taken.append(next(sampled))
        return taken


_draft_tokens_of: Final = attrgetter("draft_tokens")


def has_drafts(works: Sequence[Work]) -> bool:
    """Return whether any of these works has draft tokens to verify."""
    return any(map(_draft_tokens_of, works))


def take_each(works: Sequence[Work], tokens: Sequence[SampledToken]) -> list[list[SampledToken]]:
    """Return the tokens of each of these works from `tokens`, the results of their step."""
    if len(tokens) == len(works) and not has_drafts(works):
        return [[token] for token in tokens]
    sampled = iter(tokens)
    return [work.take(sampled) for work in works]


def finish_reason(request: Request, eos_token_ids: Sequence[int], next_id: int | None = None) -> FinishReason | None:
    """Return why the last token of the request ends its output, or None if it does not.

    With `next_id`, returns why that token would end the output as the next one. The coordinator handles stop strings.
    """
    sampling, num_output_tokens = request.sampling, len(request.token_ids) - request.num_prompt_tokens
    if next_id is None:
        last = request.token_ids[-1]
    else:
        last, num_output_tokens = next_id, num_output_tokens + 1
    is_stop = last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos)
    if is_stop and num_output_tokens >= sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= sampling.max_tokens else None


def would_end(request: Request, sampled: SampledToken, eos_token_ids: Sequence[int]) -> bool:
    """Return whether a result of the next step would end the request's output: as its last token, or as no token."""
    if sampled.error is not None or sampled.embedding:
        return True
    return finish_reason(request, eos_token_ids, sampled.token_id) is not None
