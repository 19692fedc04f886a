"""Sampling under grammars, with guides that say the same tokens always."""

import math

import pytest
import torch

from engine.ops.backends import choose_ops
from engine.ops.base import Ops
from engine.sampler import sample
from serving_core.errors import RequestError
from serving_core.requests import Request, SamplingParams

EOS = (7,)
OPS = [Ops(), choose_ops(torch.device("cpu"))]


class Only:
    """Lets these tokens come next."""

    def __init__(self, *token_ids):
        self.token_ids = token_ids

    def allowed(self, output):
        mask = bytearray(max(self.token_ids) // 8 + 1)
        for token in self.token_ids:
            mask[token // 8] |= 1 << token % 8
        return bytes(mask)


class Stuck:
    def allowed(self, output):
        raise RequestError("BAD_PARAM", f"no way after {output}")


def request(guide=None, output=(), **sampling):
    asked = Request("r", 0, [0, *output], 1, SamplingParams(max_tokens=99, **sampling))
    asked.guide = guide
    return asked


def one(logits, guide, **sampling):
    (token,) = sample(torch.tensor([logits]), [request(guide, **sampling)], EOS)
    return token


@pytest.mark.parametrize("ops", OPS, ids=["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_likeliest_of_those_allowed_whoever_is_beside_it(ops, dtype):
    logits = torch.arange(20.0).repeat(4, 1).to(dtype)
    guides = [Only(3, 9), None, Only(4), Only(17, 19)]
    chosen = sample(logits, [request(guide, temperature=0.0) for guide in guides], EOS, ops)
    assert [token.token_id for token in chosen] == [9, 19, 4, 19]


@pytest.mark.parametrize("ops", OPS, ids=["torch", "native"])
def test_what_is_known_to_be_likeliest_counts_unless_a_grammar_forbids_it(ops):
    logits = torch.arange(20.0).repeat(2, 1)
    for guide, expected in ((None, 19), (Only(4), 4)):
        asked = [request(guide, temperature=0.0), request(None, temperature=0.0)]
        chosen = sample(logits.clone(), asked, EOS, ops, ops.likeliest(logits))
        assert [token.token_id for token in chosen] == [expected, 19]


def test_sampled_are_those_allowed_as_if_there_were_no_others():
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1))
    masked = torch.full((20,), -torch.inf)
    masked[[3, 9, 12]] = logits[[3, 9, 12]]
    drawn = [one(logits.tolist(), Only(3, 9, 12), seed=seed, top_p=0.99).token_id for seed in range(200)]
    assert drawn == [one(masked.tolist(), None, seed=seed, top_p=0.99).token_id for seed in range(200)]
    assert set(drawn) == {3, 9, 12}


def test_bias_penalties_and_cuts_choose_among_those_allowed():
    logits, allowed = [5.0, 1.0, 2.0, 9.0], Only(0, 1, 2)
    assert one(logits, allowed, temperature=0.0, logit_bias=((1, 100.0), (3, 100.0))).token_id == 1
    assert one(logits, allowed, temperature=0.0, output=(0,), presence_penalty=2.0, frequency_penalty=2.0).token_id == 2
    assert one(logits, allowed, temperature=0.0, output=(0,), repetition_penalty=5.0).token_id == 2
    for seed in range(50):
        assert one(logits, allowed, seed=seed, top_k=4, temperature=5.0).token_id != 3
        assert one(logits, allowed, seed=seed, min_p=0.01, top_p=0.9, temperature=5.0).token_id != 3


def test_logprobs_are_those_of_the_tokens_that_may_come():
    token = one([1.0, 2.0, 3.0, 9.0], Only(0, 2), temperature=0.0, logprobs=4)
    whole = math.log(math.exp(1.0) + math.exp(3.0))
    assert token.logprob == pytest.approx(3.0 - whole)
    assert [each for each, _ in token.top_logprobs] == [2, 0]
    assert [logprob for _, logprob in token.top_logprobs] == pytest.approx([3.0 - whole, 1.0 - whole])


def test_what_the_mask_does_not_reach_to_may_not_come():
    assert one([float(token) for token in range(30)], Only(2, 5), temperature=0.0).token_id == 5


def test_a_grammar_that_goes_no_further_is_the_end_of_its_own_answer():
    logits = torch.arange(8.0).repeat(3, 1)
    asked = [request(Only(2), temperature=0.0), request(Stuck(), output=(4,), logprobs=1), request(temperature=0.0)]
    chosen = sample(logits, asked, EOS)
    assert [chosen[0].token_id, chosen[2].token_id] == [2, 7]
    assert str(chosen[1].error) == "no way after [4]"
    assert chosen[0].error is None


def test_only_allowed_tokens_need_logits_that_are_numbers():
    assert one([1.0, math.nan, 0.0], Only(0), temperature=0.0).token_id == 0
    assert "not finite" in str(one([1.0, math.nan, 0.0], Only(0, 1), temperature=0.0).error)
