import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process

from engine.sampler import sample, uniform
from serving_core.requests import Request, SamplingParams

EOS = (7,)


def request(prompt=(0,), output=(), **sampling):
    return Request("r", 0, [*prompt, *output], len(prompt), SamplingParams(max_tokens=99, **sampling))


def sample_one(logits, **fields):
    (token,) = sample(torch.tensor([logits]), [request(**fields)], EOS)
    return token


def greedy_after(logits, **fields):
    return sample_one(logits, temperature=0.0, **fields).token_id


def test_greedy_takes_the_first_of_the_likeliest():
    assert greedy_after([1.0, 3.0, 3.0, 2.0]) == 1


def test_rows_of_many_kinds_in_one_batch():
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0], [9.0, 5.0, 1.0]])
    requests = [request(temperature=0.0), request(temperature=0.0, logit_bias=((2, 10.0),)), request(top_k=1)]
    assert [token.token_id for token in sample(logits, requests, EOS)] == [1, 2, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"logprobs": 2}, {"logit_bias": ((0, 1.0),), "seed": 3}])
def test_logits_that_are_not_numbers_are_an_error_of_their_request_alone(bad, fields):
    good = [0.0, 3.0, 1.0]
    asked = [request(**fields) for _ in range(3)]
    alone = sample(torch.tensor([good]), asked[:1], EOS)
    first, failed, last = sample(torch.tensor([good, [0.0, bad, 1.0], good]), asked, EOS)
    assert [first] == [last] == alone
    assert (failed.error.reason, str(failed.error)) == ("STEP_FAILED", "the model's logits are not finite numbers")


def test_repetition_penalty_by_hand():
    # Tokens 0 (prompt) and 1 (output) are known: 4 / 2 = 2 and -1 * 2 = -2; others stay.
    logits, fields = [4.0, -1.0, 2.5, -1.5], {"prompt": (0,), "output": (1,), "repetition_penalty": 2.0}
    assert greedy_after(logits, **fields) == 2
    assert greedy_after(logits, **fields, logit_bias=((2, -0.6),)) == 0  # 1.9 < 2
    assert greedy_after([-9.0, -1.0, -9.0, -1.5], **fields) == 3  # -2 < -1.5


def test_frequency_and_presence_penalties_by_hand():
    # Over the output alone: token 0 was in the prompt, token 1 is twice in the output, token 2 once.
    fields = {"prompt": (0, 0, 0), "output": (1, 1, 2)}
    assert greedy_after([1.0, 2.9, 0.0, 0.0], **fields, frequency_penalty=1.0) == 0  # 2.9 - 2 * 1 = 0.9
    assert greedy_after([1.0, 3.1, 0.0, 0.0], **fields, frequency_penalty=1.0) == 1
    assert greedy_after([1.0, 1.9, 0.0, 0.0], **fields, presence_penalty=1.0) == 0  # 1.9 - 1
    assert greedy_after([1.0, 2.1, 0.0, 0.0], **fields, presence_penalty=1.0) == 1
    assert greedy_after([1.0, 3.9, 0.0, 0.0], **fields, presence_penalty=1.0, frequency_penalty=1.0) == 0
    assert greedy_after([1.0, 0.0, 0.0, 0.0], prompt=(0, 0), frequency_penalty=2.0) == 0  # no output yet


def test_repetition_penalty_equals_transformers():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    tokens = [3, 3, 9, 41, 17]
    expected = logits_process.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    fields = request(prompt=tokens[:2], output=tokens[2:], repetition_penalty=1.7, temperature=0.0)
    assert sample(logits, [fields], EOS)[0].token_id == int(expected.argmax())


def test_min_tokens_masks_end_and_stop_tokens():
    logits = [0.0] * 6 + [8.0, 9.0, 7.0]
    fields = {"min_tokens": 2, "stop_token_ids": (6,)}
    assert greedy_after(logits, output=(1,), **fields) == 8
    assert greedy_after(logits, output=(1, 1), **fields) == 7
    for seed in range(50):
        assert sample_one(logits, output=(1,), seed=seed, **fields).token_id not in (6, 7)


def test_only_allowed_tokens_come_whatever_else_is_asked_for():
    logits = [9.0, 1.0, 3.0, 2.0, 8.0]
    assert greedy_after(logits, allowed_token_ids=(3, 2)) == 2
    assert greedy_after(logits, allowed_token_ids=(3, 2), logit_bias=((0, 100.0), (3, 5.0))) == 3
    assert greedy_after(logits, allowed_token_ids=(3, 2), output=(2,), repetition_penalty=2.0) == 3  # 3 / 2 < 2
    alone = [sample_one(logits, seed=seed, allowed_token_ids=(3, 2), top_k=4).token_id for seed in range(200)]
    masked = [-math.inf, -math.inf, 3.0, 2.0, -math.inf]
    assert alone == [sample_one(masked, seed=seed).token_id for seed in range(200)]
    assert set(alone) == {2, 3}


def test_logprobs_of_allowed_tokens_are_those_among_all():
    logits = [1.0, 2.0, 3.0]
    token = sample_one(logits, temperature=0.0, allowed_token_ids=(0,), logprobs=1)
    assert (token.token_id, token.logprob) == (0, pytest.approx(1.0 - math.log(sum(map(math.exp, logits)))))
    assert token.top_logprobs[0][0] == 2


RUNS = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


@given(bad=st.lists(RUNS, min_size=1, max_size=6, unique=True), output=st.lists(st.integers(0, 5), max_size=6))
def test_bad_runs_of_tokens_equal_transformers(bad, output):
    """Of the answer: those that its prompt begins are none."""
    logits = torch.randn(1, 7, generator=torch.Generator().manual_seed(len(output))) + torch.arange(7, 0, -1)
    processor = logits_process.NoBadWordsLogitsProcessor([[*run] for run in bad], eos_token_id=EOS[0])
    expected = processor(torch.tensor([output], dtype=torch.long), logits.clone())
    chosen = greedy_after(logits[0].tolist(), prompt=(5, 4, 3), output=output, bad_tokens=tuple(bad))
    assert chosen == int(expected.argmax())


def test_a_bad_run_that_only_the_prompt_begins_may_come():
    assert greedy_after([0.0, 1.0, 9.0], prompt=(0, 1), bad_tokens=((1, 2),)) == 2
    assert greedy_after([0.0, 1.0, 9.0], prompt=(0,), output=(1,), bad_tokens=((1, 2),)) == 1
    assert greedy_after([0.0, 1.0, 9.0], prompt=(0,), output=(1,), bad_tokens=((1, 2),), logit_bias=((2, 99.0),)) == 1


def test_banning_every_token_still_gives_a_token():
    logits = [0.0] * 8
    for temperature in (0.0, 1.0):
        token = sample_one(logits, temperature=temperature, min_tokens=1, stop_token_ids=tuple(range(8)))
        assert 0 <= token.token_id < 8


def test_logprobs_are_of_the_raw_distribution():
    logits = [1.0, 2.0, 3.0, 2.5]
    total = sum(map(math.exp, logits))
    token = sample_one(logits, temperature=0.0, logit_bias=((0, 100.0),), logprobs=2)
    assert token.token_id == 0
    assert token.logprob == pytest.approx(1.0 - math.log(total))
    assert [token_id for token_id, _ in token.top_logprobs] == [2, 3]
    assert [logprob for _, logprob in token.top_logprobs] == pytest.approx([3 - math.log(total), 2.5 - math.log(total)])
    assert sample_one(logits, temperature=0.0, logprobs=0).top_logprobs == ()
    assert sample_one(logits, temperature=0.0).logprob is None


def reference_probabilities(logits, sampling):
    """transformers' own warpers, in our order, then a softmax in float64."""
    scores = (torch.tensor([logits]) - max(logits)) / sampling.temperature
    warpers = []
    if sampling.min_p > 0:
        warpers.append(logits_process.MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        warpers.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0].double().softmax(0).numpy()


@given(
    rng_seed=st.integers(0, 2**32),
    num_tokens=st.sampled_from([2, 40, 3000]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 10_000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 5),
)
def test_draw_inverts_the_distribution_of_transformers(
    rng_seed, num_tokens, temperature, top_k, top_p, min_p, seed, position
):
    logits = (np.random.default_rng(rng_seed).standard_normal(num_tokens) * 3).astype(np.float32).tolist()
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    token = sample_one(logits, output=[1] * position, **fields).token_id
    probabilities = reference_probabilities(logits, SamplingParams(max_tokens=1, **fields))
    masses, number = probabilities.cumsum(), uniform(seed, position)
    assert probabilities[token] > 0
    assert masses[token] - probabilities[token] - 1e-5 <= number <= masses[token] + 1e-5


def test_frequencies_follow_the_probabilities():
    logits = [0.0, math.log(2.0), math.log(5.0), -math.inf]
    rows = torch.tensor([logits]).expand(4000, 4)
    drawn = [token.token_id for token in sample(rows, [request(seed=seed) for seed in range(4000)], EOS)]
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0], abs=0.02)


def test_draw_does_not_depend_on_the_batch():
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    requests = [request(output=[1] * i, seed=i % 2, top_p=0.9) for i in range(6)]
    together = sample(logits, requests, EOS)
    alone = [sample(logits[i : i + 1], [requests[i]], EOS)[0] for i in range(6)]
    backwards = sample(logits.flip(0), requests[::-1], EOS)[::-1]
    assert together == alone == backwards


def philox4x64(counter, key):
    """The first word of Philox4x64-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011)."""
    words, keys = [counter, 0, 0, 0], [key, 0]
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        low = 2**64 - 1
        words = [(right >> 64) ^ words[1] ^ keys[0], right & low, (left >> 64) ^ words[3] ^ keys[1], left & low]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & low, (keys[1] + 0xBB67AE8584CAA73B) & low]
    return words[0]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 0), (7, 1), (2**64 - 1, 100_000)])
def test_uniform_is_philox_of_seed_and_position(seed, position):
    # numpy counts up before it draws. Other numbers here would change every seeded answer.
    assert uniform(seed, position) == (philox4x64(position + 1, seed) >> 11) / 2**53


def test_negative_seeds_are_seeds_too():
    assert uniform(-1, 3) == uniform(2**64 - 1, 3) != uniform(1, 3)


def test_uniform_is_uniform_over_seeds_and_positions():
    numbers = np.array([[uniform(seed, position) for position in range(50)] for seed in range(200)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(1000, abs=120)
    for neighbours in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(np.corrcoef(neighbours[0].ravel(), neighbours[1].ravel())[0, 1]) < 0.05
