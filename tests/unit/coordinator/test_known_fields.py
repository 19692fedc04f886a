"""The list of fields against the types of OpenAI's client, vLLM's lists, what the API servers read, and
docs/fields.md."""

import functools
from typing import Any

import pytest

from coordinator.api.http.anthropic_messages import MessagesCall
from coordinator.api.http.embeddings import parse_embeddings
from coordinator.api.http.fields import Fields
from coordinator.api.http.known_fields import (
    BATCH,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    KNOWN,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Fate,
)
from coordinator.api.http.openai_responses import ResponsesCall
from coordinator.api.http.requests import parse_batch, parse_chat, parse_completion
from coordinator.api.http.slo import set_limits
from coordinator.api.http.tokenizing import parse_detokenize, parse_tokenize
from serving_core.errors import RequestError
from tests.field_table import PAGE, page

TURNS = [{"role": "user", "content": "c"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "p"},
    CHAT: {"messages": TURNS},
    BATCH: {"messages": [TURNS, TURNS]},
    RESPONSES: {"input": "c"},
    MESSAGES: {"messages": TURNS},
    EMBEDDINGS: {"input": "p"},
    TOKENIZE: {"messages": TURNS},
    DETOKENIZE: {"tokens": [1]},
}
PARSERS = {
    COMPLETIONS: lambda fields: parse_completion(fields, "id"),
    CHAT: lambda fields: parse_chat(fields, "id"),
    BATCH: lambda fields: parse_batch(fields, "id"),
    RESPONSES: lambda fields: ResponsesCall().parse(fields, "id"),
    MESSAGES: lambda fields: MessagesCall().parse(fields, "id"),
    EMBEDDINGS: lambda fields: parse_embeddings(fields, "id"),
    TOKENIZE: parse_tokenize,
    DETOKENIZE: lambda fields: parse_detokenize(fields, 10),
}

# Of vLLM's protocol at 002032ee, beside what OpenAI's types have.
VLLM = """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens
response_format structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs repetition_detection thinking_token_budget stream_interval"""
OF_TEMPLATES = "add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs"
VLLM_CHAT = f"""{VLLM} {OF_TEMPLATES} mm_processor_kwargs include_reasoning echo documents return_prompt_text
reasoning_effort"""
VLLM_RESPONSES = """request_id session_id media_io_kwargs mm_processor_kwargs priority cache_salt include_reasoning
enable_response_messages previous_input_messages previous_response structured_outputs repetition_penalty seed stop
ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs logit_bias top_k skip_special_tokens
include_stop_str_in_output presence_penalty frequency_penalty"""
VLLM_EMBEDDINGS = f"""{OF_TEMPLATES} mm_processor_kwargs truncate_prompt_tokens truncation_side request_id priority
cache_salt add_special_tokens messages embed_dtype endianness use_activation normalize additional_data"""


@functools.cache
def fields_of_others():
    """Return the names of OpenAI's and vLLM's fields by endpoint. Anthropic's are in test_anthropic_messages.py."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
    from openai.types.embedding_create_params import EmbeddingCreateParams
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams

    return {
        COMPLETIONS: {*CompletionParams.__annotations__, *VLLM.split(), "prompt_embeds"},
        CHAT: {*ChatParams.__annotations__, *VLLM_CHAT.split()},
        BATCH: {
            *ChatParams.__annotations__,
            *VLLM_CHAT.split(),
            "best_of",
            "early_stopping",
            "guided_decoding_backend",
        },
        RESPONSES: {*ResponseParams.__annotations__, *VLLM_RESPONSES.split()},
        EMBEDDINGS: {*EmbeddingCreateParams.__annotations__, *VLLM_EMBEDDINGS.split()},
        TOKENIZE: {
            *OF_TEMPLATES.split(),
            "model",
            "prompt",
            "messages",
            "add_special_tokens",
            "return_token_strs",
            "tools",
        },
        DETOKENIZE: {"model", "tokens"},
    }


def known(endpoint, *fates):
    return [each for each in KNOWN if endpoint in each.endpoints and (not fates or each.fate in fates)]


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_field_of_openai_and_vllm_is_listed_once(endpoint):
    names = [each.name for each in known(endpoint)]
    assert fields_of_others().get(endpoint, set()) - set(names) == set()
    assert len(names) == len(set(names))


class NotedFields(Fields):
    """Fields that note the names of those that are read."""

    def __init__(self, values):
        super().__init__(values)
        self.read = set()

    def raw(self, name):
        self.read.add(name)
        return super().raw(name)


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_is_read_is_what_is_listed(endpoint):
    fields = NotedFields(BODIES[endpoint])
    asked = PARSERS[endpoint](fields)
    read = set(fields.read)
    if endpoint == TOKENIZE:
        other = NotedFields({"prompt": "p"})
        parse_tokenize(other)
        read |= other.read
    elif endpoint == EMBEDDINGS:
        read |= {"request_id"}  # before all else
    elif endpoint != DETOKENIZE:
        set_limits(asked.requests, fields, {})
        read |= fields.read | {"request_id"}  # before all else
    assert read == {each.name for each in known(endpoint)}


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_is_refused_is_named_and_what_asks_for_nothing_may_be_sent(endpoint):
    body, parse = BODIES[endpoint], PARSERS[endpoint]
    for field in known(endpoint, Fate.REFUSED):
        with pytest.raises(RequestError) as caught:
            parse(Fields({**body, field.name: {"some": "thing"}}))
        assert (caught.value.reason, caught.value.metadata["field"]) == ("BAD_PARAM", field.name)
        assert str(caught.value) == f"{field.name} (an object) is not supported: {field.about}"
        for harmless in (None, *field.harmless):
            assert with_n(parse(Fields({**body, field.name: harmless}))) == with_n(parse(Fields(body))), field.name


def with_n(asked):
    """One answer is what is asked for without a number, too."""
    for request in getattr(asked, "requests", ()) if hasattr(asked, "num_answers") else ():
        request.sampling_params.n = request.sampling_params.n or 1
    return asked


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_has_no_effect_is_known_and_has_none(endpoint):
    for field in known(endpoint, Fate.IDLE):
        fields = Fields({**BODIES[endpoint], field.name: {"some": "thing"}})
        assert PARSERS[endpoint](fields) == PARSERS[endpoint](Fields(BODIES[endpoint])), field.name
        assert fields.unread() == [], field.name


@pytest.mark.parametrize(("n", "best_of"), [(None, 1), (1, 1), (3, 3)])
def test_best_of_may_be_what_n_is(n, best_of):
    assert parse_completion(Fields({"prompt": "p", "n": n, "best_of": best_of}), "id") == (
        parse_completion(Fields({"prompt": "p", "n": n}), "id")
    )
    with pytest.raises(RequestError, match=r"^best_of \(4\) is not supported"):
        parse_completion(Fields({"prompt": "p", "n": n, "best_of": 4}), "id")


def test_the_table_is_what_the_api_server_does():
    assert PAGE.read_text() == page(), "python -m tests.field_table writes it"
