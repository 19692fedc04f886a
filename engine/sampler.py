"""Sample the next token of each request from the model's logits: grammar masks, penalties, sampling, logprobs.

The order is vLLM's: grammar, allowed tokens, bad words, logit_bias, min_tokens, penalties, temperature, min_p, top_k,
top_p, then the random choice, which depends on the seed and the position in the output alone and walks the vocabulary
in token id order. What begins with the temperature is `Ops.sample` (engine/ops/topk_topp.py). So a request gets the
same token in any batch, on any node and after any restart that computes the same logits.
"""

import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch

from engine.ops.base import Likeliest, Logits, Ops
from engine.ops.topk_topp import RowSampling
from serving_core.errors import RequestError
from serving_core.reasons import STEP_FAILED
from serving_core.requests import NO_TOKEN, Request, SampledToken, Share, Work


def sample_step(
    logits: Logits, works: Sequence[Work], shares: Sequence[Share], eos_token_ids: Sequence[int], ops: Ops
) -> list[SampledToken]:
    """Return the sampled tokens of a step in order, for each work whose share samples, as Work.take consumes them.

    `shares` are the shares of the works. Verifies draft tokens, and stores the prompt scores that the step computes in
    the requests. `ops` computes; eos_token_ids matter for min_tokens alone.
    """
    rows, likeliest = logits
    if any(share.num_scored > len(work.draft_tokens) for work, share in zip(works, shares, strict=True)):
        rows, likeliest = take_scores(rows, works, ops), None
    sampling = [work for work, share in zip(works, shares, strict=True) if share.samples]
    if any(work.draft_tokens for work in sampling):
        return verify(rows, sampling, eos_token_ids, ops, likeliest)
    requests = [work.request for work in sampling]
    return sample(rows, requests, eos_token_ids, ops, likeliest) if requests else []


def forbid(logits: torch.Tensor, requests: Sequence[Request]) -> dict[int, RequestError]:
    """Set the logits [S, vocab_size] of tokens that the grammar of the row's request forbids to -inf, in place.

    Returns the error of each row, by its index, whose grammar allows no token; such a row stays unchanged.
    """
    masks: dict[int, bytes] = {}
    errors: dict[int, RequestError] = {}
    for row, request in enumerate(requests):
        if request.guide is not None:
            try:
                masks[row] = request.guide.allowed(request.output)
            except RequestError as error:
                errors[row] = error
    if masks:  # in one operation, as each may synchronize all threads
        logits.masked_fill_(_forbidden(masks, *logits.shape).to(logits.device), -torch.inf)
    return errors


def _forbidden(masks: Mapping[int, bytes], num_rows: int, vocab_size: int) -> torch.Tensor:
    """Return bools [num_rows, vocab_size]. Tokens beyond the end of a row's mask are forbidden too."""
    forbidden = np.zeros((num_rows, vocab_size), dtype=np.bool_)
    for row, mask in masks.items():
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size]
        forbidden[row, : len(bits)] = bits == 0
        forbidden[row, len(bits) :] = True
    return torch.from_numpy(forbidden)


def is_adjusted(request: Request) -> bool:
    """Return whether penalties, biases, token lists or min_tokens change the logits of the request's next token."""
    sampling = request.sampling
    return (
        bool(sampling.logit_bias)
        or bool(sampling.allowed_token_ids)
        or bool(sampling.bad_tokens)
        or (sampling.min_tokens > 0 and request.num_output_tokens < sampling.min_tokens)
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )


def adjust(logits: torch.Tensor, request: Request, eos_token_ids: Sequence[int]) -> None:
    """Apply the request's token lists, biases, min_tokens and penalties to one row of logits [vocab_size], in place.

    The row is float32. `eos_token_ids` may not be sampled before min_tokens.
    """
    sampling = request.sampling
    if sampling.allowed_token_ids:
        _keep(logits, sampling.allowed_token_ids)
    if sampling.bad_tokens:
        logits.index_fill_(0, _on(logits.device, list(_last_of_bad(request))), -torch.inf)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if request.num_output_tokens < sampling.min_tokens:
        logits.index_fill_(0, _on(logits.device, (*eos_token_ids, *sampling.stop_token_ids)), -torch.inf)
    if sampling.repetition_penalty != 1:
        _penalize_repetition(logits, request.token_ids, sampling.repetition_penalty)
    if (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0) and request.num_output_tokens:
        _penalize_output(logits, request.output, sampling.frequency_penalty, sampling.presence_penalty)


def _keep(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Set the logits of all other tokens to -inf."""
    allowed = _on(logits.device, token_ids)
    kept = logits[allowed]
    logits.fill_(-torch.inf)[allowed] = kept


def _last_of_bad(request: Request) -> Iterator[int]:
    """Yield the last token of each bad run whose other tokens end the output."""
    token_ids = request.token_ids
    for *before, last in request.sampling.bad_tokens:
        if len(before) <= request.num_output_tokens and token_ids[len(token_ids) - len(before) :] == before:
            yield last


def _penalize_repetition(logits: torch.Tensor, token_ids: Sequence[int], penalty: float) -> None:
    """Divide positive logits of prompt and output tokens by the penalty, and multiply negative ones (CTRL, arXiv
    1909.05858).
    """
    seen = _on(logits.device, token_ids)
    values = logits[seen]  # a repeated token is written twice, with the same value
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalize_output(logits: torch.Tensor, output: Sequence[int], frequency: float, presence: float) -> None:
    """Subtract the frequency penalty for each occurrence in the output, and the presence penalty once."""
    seen, counts = np.unique(_packed(output), return_counts=True)
    penalties = frequency * torch.from_numpy(counts) + presence
    logits[_on(logits.device, seen)] -= penalties.to(logits.device, non_blocking=True)


def _on(device: torch.device, token_ids: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Return tokens as an index on the device, without synchronizing with it."""
    packed = token_ids if isinstance(token_ids, np.ndarray) else _packed(token_ids)
    return torch.from_numpy(packed).to(device, non_blocking=True)


def _packed(token_ids: Sequence[int]) -> np.ndarray:
    """Return int64 ids. Several times as fast as torch and numpy convert a list, which may hold thousands."""
    return np.array(array("q", token_ids))


BLOCK: Final = 64  # tokens; the search for the likeliest tokens of a row ranks blocks by their maximum


class Beside(NamedTuple):
    """The tokens whose logprobs accompany a token's: the `num_top` likeliest, or the named ones if there are any."""

    num_top: int
    named: Sequence[int] = ()


def with_logprobs(
    logits: torch.Tensor,
    highest: torch.Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    beside: Sequence[Beside],
    ops: Ops,
) -> list[SampledToken]:
    """Return a SampledToken with logprobs for each entry of `rows`, which index the logits [S, vocab_size].

    `tokens` and `beside` are parallel to `rows`: the token, and which other logprobs it gets. `highest` [S], float32,
    holds the maximum of each row of logits. The likeliest token comes first; of equal ones, the lowest id. Tokens of
    probability 0 are left out. Logprobs are rounded to float32.
    """
    totals = ops.log_totals(logits, highest, rows)
    if [*rows] != [*range(len(logits))]:
        logits = logits[[*rows]]
    ids = torch.tensor(tokens).to(logits.device)[:, None]
    num_named = max(len(each.named) for each in beside)
    if num_named:
        named = [[*each.named, *[0] * (num_named - len(each.named))] for each in beside]
        ids = torch.cat((ids, torch.tensor(named).to(logits.device)), 1)
    if num_top := min(max(0 if each.named else each.num_top for each in beside), logits.shape[1]):
        ids = torch.cat((ids, _likeliest(logits, num_top)), 1)
    logprobs = (logits.gather(1, ids).double() - totals[:, None]).float()
    scored = []
    for listed, numbers, (count, names) in zip(ids.tolist(), logprobs.tolist(), beside, strict=True):
        told = slice(1, 1 + len(names)) if names else slice(1 + num_named, 1 + num_named + count)
        may_come = [pair for pair in zip(listed[told], numbers[told], strict=True) if pair[1] > -math.inf]
        may_come.sort(key=lambda pair: -pair[1])
        scored.append(SampledToken(listed[0], numbers[0], tuple(may_come)))
    return scored


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids [S, count] of the likeliest tokens of each row. They lie in the blocks with the largest maxima."""
    num_blocks = logits.shape[1] // BLOCK
    if count >= num_blocks:
        return _first(logits, count)
    end, device = num_blocks * BLOCK, logits.device
    blocks = _first(logits[:, :end].view(-1, num_blocks, BLOCK).amax(2), count).sort().values
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
    ids = torch.cat((ids, torch.arange(end, logits.shape[1], device=device).expand(len(ids), -1)), 1)
    return ids.gather(1, _first(logits.gather(1, ids), count))


def _first(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest numbers [S, count] of each row, descending; of equal numbers, the lowest index
    first.

    topk alone orders equal numbers arbitrarily.
    """
    bits = numbers.float().view(torch.int32)
    in_order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # integers in the order of the floats
    places = torch.arange(numbers.shape[1], device=numbers.device)
    return (in_order * 2**32 - places).topk(count).indices


def take_scores(logits: torch.Tensor, works: Sequence[Work], ops: Ops) -> torch.Tensor:
    """Store the prompt scores that this step computes in the requests; return the rows that tokens are sampled from.

    `logits` are those of the batch of these works. The returned rows of `logits` are those of the last token and the
    draft tokens of each work that samples. Scores go to Request.scores, from the step's start on.
    """
    left: list[int] = []
    row = 0
    for work in works:
        request, first, num_scored = work.request, work.start, work.num_scored
        if num_scored:
            tokens = request.token_ids[first + 1 : first + 1 + num_scored]
            beside = Beside(request.sampling.prompt_logprobs or 0)
            ours = logits[row : row + num_scored]
            highest, _ = ops.likeliest(ours)
            scores = with_logprobs(ours, highest, range(num_scored), tokens, [beside] * num_scored, ops)
            request.scores[first:] = scores
        row += num_scored
        if work.samples:
            num_sampled = 1 + len(work.draft_tokens)
            left += range(row, row + num_sampled)
            row += num_sampled
    return logits[left]


TORCH_OPS: Final = Ops()
_SEED_MASK: Final = 2**64 - 1
_DOUBLE_STEP: Final = 2.0**-53


def sample(
    logits: torch.Tensor,
    requests: Sequence[Request],
    eos_token_ids: Sequence[int],
    ops: Ops = TORCH_OPS,
    likeliest: Likeliest | None = None,
) -> list[SampledToken]:
    """Sample the next token of each request from its row of logits [S, vocab_size], with the requested logprobs.

    Sets the logits of tokens that a grammar forbids to -inf. `likeliest` holds the largest logit and its token for each
    row, if known; its tensors are overwritten. `eos_token_ids` may not be sampled before min_tokens. A row whose
    grammar allows no token, or whose largest logit is not finite, gets a SampledToken with an error. A request with
    pooling gets its logprobs instead of a token.
    """
    samplings: list[RowSampling] = []
    adjusted: list[int] = []
    beside: dict[int, Beside] = {}
    is_guided = is_pooled = False
    for row, request in enumerate(requests):
        sampling = request.sampling
        if is_adjusted(request):
            adjusted.append(row)
        elif sampling.temperature > 0:
            samplings.append(_row_sampling(row, request))
        if sampling.logprobs is not None:
            beside[row] = Beside(sampling.logprobs, sampling.logprob_token_ids)
        is_guided |= request.guide is not None
        is_pooled |= request.pooling is not None
    errors = forbid(logits, requests) if is_guided else {}
    highest, tokens = _choose(logits, samplings, ops, None if is_guided else likeliest)
    if adjusted:
        rows = torch.tensor(adjusted).to(logits.device, non_blocking=True)
        tokens[rows] = _choose_adjusted(logits[rows].float(), [requests[row] for row in adjusted], eos_token_ids, ops)
    token_ids = tokens.tolist()  # the first synchronization with the device
    sampled = list(map(SampledToken, token_ids))
    are_finite = list(map(math.isfinite, highest.tolist()))
    failed = {row: overflowed("logits") for row, is_good in enumerate(are_finite) if not is_good}
    failed |= {row: SampledToken(NO_TOKEN, error=error) for row, error in errors.items()}
    if beside := {row: each for row, each in beside.items() if row not in failed}:
        ours = [token_ids[row] for row in beside]
        scored = with_logprobs(logits, highest, [*beside], ours, [*beside.values()], ops)
        for row, token in zip(beside, scored, strict=True):
            sampled[row] = token
    for row, token in failed.items():
        sampled[row] = token
    if not is_pooled:
        return sampled
    return [
        token if request.pooling is None or token.error is not None else _pooled(request, token)
        for request, token in zip(requests, sampled, strict=True)
    ]


def _pooled(request: Request, token: SampledToken) -> SampledToken:
    """Return the logprobs of the request's tokens instead of a token; -inf for tokens that cannot come."""
    found = dict(token.top_logprobs)
    logprobs = [found.get(token_id, -math.inf) for token_id in request.sampling.logprob_token_ids]
    return SampledToken(NO_TOKEN, embedding=struct.pack(f"<{len(logprobs)}f", *logprobs))


def verify(
    logits: torch.Tensor,
    works: Sequence[Work],
    eos_token_ids: Sequence[int],
    ops: Ops,
    likeliest: Likeliest | None = None,
) -> list[SampledToken]:
    """Sample the tokens of each work, whose draft tokens it verifies, in order, as Work.take consumes them.

    A draft token is accepted if it equals the token sampled before it. Behind each accepted draft token one more token
    is sampled, just as a step without draft tokens samples it: from logits with the same bits, for a request with the
    same tokens. So speculation changes only the time, also with penalties, grammars and seeds.

    For each work, `logits` has one row for its last known token, then one for each draft token. `likeliest` holds the
    largest logit and its token for each row, if known. A row whose grammar allows no token, or whose largest logit is
    not finite, gives a SampledToken with an error.
    """
    given: list[list[SampledToken]] = [[] for _ in works]
    going, row = [], 0
    for place, work in enumerate(works):
        going.append((place, row, work.request))
        row += 1 + len(work.draft_tokens)
    while going:
        rows, requests = [row for _, row, _ in going], [request for *_, request in going]
        known = None if likeliest is None else (likeliest[0][rows], likeliest[1][rows])
        tokens = sample(logits[rows], requests, eos_token_ids, ops, known)
        behind = []
        for (place, row, request), token in zip(going, tokens, strict=True):
            draft_tokens = works[place].draft_tokens[len(given[place]) :]
            given[place].append(token)
            if draft_tokens and draft_tokens[0] == token.token_id:
                grown = replace(request, token_ids=[*request.token_ids, token.token_id])
                behind.append((place, row + 1, grown))
        going = behind
    return [token for tokens in given for token in tokens]


def overflowed(what: str) -> SampledToken:
    """Return a SampledToken with the error that the model's `what`, such as "logits", are not finite numbers.

    The model overflows, or this node is broken. The other requests of the step continue, and another node may retry the
    request.
    """
    return SampledToken(NO_TOKEN, error=RequestError(STEP_FAILED, f"the model's {what} are not finite numbers"))


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) that depends on seed and position alone (Philox, Salmon et al. 2011)."""
    raw = np.random.Philox(key=seed & _SEED_MASK, counter=position).random_raw()
    return (int(raw) >> 11) * _DOUBLE_STEP


def _choose(
    logits: torch.Tensor, samplings: Sequence[RowSampling], ops: Ops, likeliest: Likeliest | None = None
) -> Likeliest:
    """Return each row's largest logit and its chosen token: the likeliest, or a sampled one if `samplings` has the row.

    If `likeliest` is given, its tensors are updated in place and returned.
    """
    highest, tokens = ops.likeliest(logits) if likeliest is None else likeliest
    if samplings:
        rows = torch.tensor([sampling.row for sampling in samplings]).to(logits.device, non_blocking=True)
        tokens[rows] = ops.sample(logits, highest, samplings)
    return highest, tokens


def _choose_adjusted(
    copies: torch.Tensor, requests: Sequence[Request], eos_token_ids: Sequence[int], ops: Ops
) -> torch.Tensor:
    """Return the chosen token of each row after `adjust`; `copies` [rows, vocab_size], float32, are overwritten."""
    samplings = []
    for row, request in enumerate(requests):
        adjust(copies[row], request, eos_token_ids)
        if request.sampling.temperature > 0:
            samplings.append(_row_sampling(row, request))
    return _choose(copies, samplings, ops)[1]


def _row_sampling(row: int, request: Request) -> RowSampling:
    sampling = request.sampling
    number = uniform(sampling.seed, request.num_output_tokens)
    return RowSampling(row, number, sampling.temperature, sampling.min_p, sampling.top_p, sampling.top_k)
