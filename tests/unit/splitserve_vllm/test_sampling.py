"""What vLLM is asked for, of a request of ours; and what its outputs become."""

from types import SimpleNamespace

import pytest

from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.requests import FinishReason, Pooling, Request, SampledToken, SamplingParams
from splitserve_vllm.sampling import finish_of, sampling_fields, token_of


def request(*, output=(), pooling=None, adapter="", **sampling):
    params = SamplingParams(**{"max_tokens": 10, **sampling})
    return Request("r", 1, [1, 2, 3, *output], 3, params, pooling=pooling, adapter=adapter)


def test_all_that_vllm_samples_by_is_passed_on():
    fields = sampling_fields(
        request(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            repetition_penalty=1.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            logit_bias=((5, 1.5),),
            allowed_token_ids=(4, 5),
            seed=11,
            min_tokens=2,
            stop_token_ids=(9,),
            logprobs=3,
        ),
        (257,),
    )
    assert fields == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "seed": 11,
        "max_tokens": 10,
        "min_tokens": 2,
        "stop_token_ids": [9, 257],
        "ignore_eos": True,
        "logprobs": 3,
        "logit_bias": {5: 1.5},
        "allowed_token_ids": [4, 5],
        "detokenize": False,
    }


def test_an_output_that_an_earlier_attempt_has_begun_counts():
    fields = sampling_fields(request(output=(4, 5, 6), min_tokens=4), (257,))
    assert (fields["max_tokens"], fields["min_tokens"]) == (7, 1)


def test_the_end_of_a_text_is_no_end_where_it_is_ignored():
    assert sampling_fields(request(ignore_eos=True), (257,))["stop_token_ids"] == []


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"pooling": Pooling("mean")}, "embeddings and scores"),
        ({"adapter": "a"}, "LoRA adapters"),
        ({"grammar": "g"}, "structured output"),
        ({"bad_tokens": ((1,),)}, "bad_words"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprob_token_ids": (1,)}, "logprob_token_ids"),
        ({"output": (4,), "presence_penalty": 0.1}, "presence_penalty for an output"),
    ],
)
def test_what_vllm_does_not_do_is_refused_by_its_name(asked, name):
    with pytest.raises(RequestError, match=name) as refused:
        sampling_fields(request(**asked), ())
    assert refused.value.reason == reasons.BAD_PARAM


def test_a_token_has_the_most_likely_ones_in_order():
    logprobs = {4: SimpleNamespace(logprob=-3.0, rank=3), 6: SimpleNamespace(logprob=-0.5, rank=1)}
    logprobs[5] = SimpleNamespace(logprob=-1.0, rank=2)
    assert token_of(4, logprobs, 2) == SampledToken(4, -3.0, ((6, -0.5), (5, -1.0)))
    assert token_of(4, None, None) == SampledToken(4)


def test_the_end_of_an_output():
    assert [finish_of(each) for each in (None, "stop", "length")] == [None, FinishReason.STOP, FinishReason.LENGTH]
    with pytest.raises(RequestError, match="error"):
        finish_of("error")
