"""Logprobs of prompts through a split cluster: equal to transformers', cached or not, with the official client."""

import openai
import pytest

from splitserve import Client
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

PROMPT = list(b"The quick brown fox jumps over the lazy dog, and over it again")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=5)


@pytest.fixture(scope="module")
def cluster(start_cluster, model):
    cluster = start_cluster(
        model, http=True, node={"num_kv_blocks": 400, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    )
    yield cluster
    cluster.wait_all_free()


@pytest.fixture(scope="module")
def expected(model):
    """The logprobs of every token behind the first, and the likeliest token there."""
    logprobs = Reference(model).logits(PROMPT).log_softmax(-1)[:-1]
    return [float(row[token]) for row, token in zip(logprobs, PROMPT[1:], strict=True)], logprobs.argmax(-1).tolist()


def test_a_prompt_scores_as_in_transformers_also_when_it_is_cached(cluster, expected):
    logprobs, likeliest = expected
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        for _ in range(2):
            reply = client.completions.create(model=model, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
            told = reply.choices[0].logprobs
            assert told.token_logprobs[0] is None
            assert told.token_logprobs[1 : len(PROMPT)] == pytest.approx(logprobs, abs=1e-4)
            is_greedy = [
                value == max(top.values())
                for value, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True)
            ]
            assert is_greedy[:-1] == [best == token for best, token in zip(likeliest, PROMPT[1:], strict=True)]


@pytest.mark.nightly
def test_a_prompt_that_fills_the_context_scores_where_no_answer_is_wanted(start_cluster, model):
    context = len(PROMPT)
    cluster = start_cluster(model, http=True, node={"max_model_len": context}, coordinator={"max_model_len": context})
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": client.models.list().data[0].id, "echo": True, "logprobs": 0}
        reply = client.completions.create(prompt=PROMPT, max_tokens=0, **fields)
        assert len(reply.choices[0].logprobs.tokens) == context
        assert reply.choices[0].finish_reason == "length"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (context, 0)
        for prompt, max_tokens in ([*PROMPT, 1], 0), (PROMPT, 1):
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(prompt=prompt, max_tokens=max_tokens, **fields)
            assert error.value.code == "context_length_exceeded"
    cluster.wait_all_free()


def test_over_grpc_they_come_with_the_first_chunk(cluster, expected):
    logprobs, likeliest = expected
    with Client(f"127.0.0.1:{cluster.port}") as client:
        first, *others = client.generate(PROMPT, max_tokens=5, temperature=0, prompt_logprobs=1)
        assert [each.token_id for each in first.prompt_logprobs] == PROMPT[1:]
        assert [each.logprob for each in first.prompt_logprobs] == pytest.approx(logprobs, abs=1e-4)
        assert [each.top[0].token_id for each in first.prompt_logprobs] == likeliest
        assert not any(chunk.prompt_logprobs for chunk in others)
        assert others[-1].completion.cached_tokens == 0
