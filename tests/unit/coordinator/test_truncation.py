"""What is left of prompts that their clients let the server cut."""

import pytest

from coordinator.doors.truncation import MAX_UNCUT_TOKENS, check_truncation, cut, uncut_limit
from coordinator.doors.validation import Limits, check_input, plan_answers
from protos.inference_pb2 import GenerateRequest, SamplingParams, TokenizedInput
from serving_core.errors import RequestError

LIMITS = Limits(
    "tiny", vocab_size=260, max_model_len=100, max_logprobs=20, prefill_pool_tokens=90, decode_pool_tokens=200
)
PROMPT = list(range(150))


def request(most, **fields):
    return GenerateRequest(request_id="r", text="t", truncate_prompt_tokens=most, **fields)


@pytest.mark.parametrize(
    ("most", "max_tokens", "first"),
    [(None, 5, 0), (20, 5, 130), (149, 5, 1), (150, 5, 0), (151, 5, 0), (-1, 30, 80), (-1, None, 60), (-1, 5, 60)],
)
def test_the_last_tokens_are_kept(most, max_tokens, first):
    """-1: what fits beside the answer, 100 - 30; and into the pool of the node that reads, 90."""
    asked = request(most, sampling_params=SamplingParams(max_tokens=max_tokens))
    check_truncation(asked, LIMITS)
    assert cut(PROMPT, asked, LIMITS) == PROMPT[first:]


def test_what_fits_is_taken_and_what_leaves_no_room_is_refused():
    asked = request(-1, sampling_params=SamplingParams(max_tokens=30))
    check_input(asked, LIMITS)
    plan = plan_answers(asked, cut(PROMPT, asked, LIMITS), LIMITS, SamplingParams())
    assert (len(plan.prompt), plan.samplings[0].max_tokens) == (70, 30)
    asked = request(-1, sampling_params=SamplingParams(max_tokens=100))
    with pytest.raises(RequestError) as caught:
        plan_answers(asked, cut(PROMPT, asked, LIMITS), LIMITS, SamplingParams())
    assert caught.value.reason == "PROMPT_TOO_LONG"


@pytest.mark.parametrize("most", [0, -2])
def test_how_many_are_kept_has_to_be_said(most):
    with pytest.raises(RequestError, match=f"^truncate_prompt_tokens must be -1 or at least 1, not {most}$"):
        check_truncation(request(most), LIMITS)


def test_before_it_is_cut_a_prompt_may_be_longer_but_not_without_end():
    assert uncut_limit(request(None), LIMITS).most == 90
    limit = uncut_limit(request(5), LIMITS)
    assert limit.most == MAX_UNCUT_TOKENS
    assert str(limit.refusal(10**6)) == "input has at least 1000000 tokens, the limit is 131072 before it is cut"
    check_ids(150)
    with pytest.raises(RequestError, match=r"^tokenized.input_ids has 131073 entries, the limit is 131072$"):
        check_ids(MAX_UNCUT_TOKENS + 1)


def check_ids(num_tokens):
    tokenized = TokenizedInput(input_ids=[1] * num_tokens)
    asked = GenerateRequest(request_id="r", tokenized=tokenized, truncate_prompt_tokens=5)
    check_input(asked, LIMITS)
    check_truncation(asked, LIMITS)
