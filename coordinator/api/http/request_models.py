"""Declare the requests of the HTTP API: each field of OpenAI, Anthropic and vLLM, and the structured-output fields of
SGLang and llama.cpp, with its type, bounds, default and meaning.

The API validates by these declarations, and docs/reference/fields.md, /openapi.json and /docs come from them. An
unsupported field that would change the output is `Refused`; a field that cannot change it is `Ignored`. A field that is
not declared is unknown: the client gets a warning or an error (coordinator/api/unknown_fields.py).

Values that depend on the model or the fleet are checked where the gRPC API checks them (coordinator/api/validation.py),
which also fills in the sampling defaults of the model's folder (coordinator/served_model.py). The bounds of sampling
fields are `SAMPLING_RANGES` (serving_core/requests.py).
"""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from coordinator.api.http.body import check_num_values
from coordinator.api.http.field_types import (
    LIST,
    OBJECT,
    TEXT,
    Ignored,
    Int32,
    Int64,
    Model,
    Refused,
    RequestModel,
    Texts,
    TokenIds,
    by_json_type,
    expected,
    fault,
    shown,
)
from coordinator.api.scoring import MAX_ITEMS, MAX_LABELS
from coordinator.api.validation import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from coordinator.control.slo import MAX_PRIORITY
from coordinator.text.calls.reader import MAX_CALLS, NAME
from serving_core.requests import SAMPLING_RANGES

MAX_TIER_CHARS: Final = 64
MAX_ARGUMENTS_CHARS: Final = 2**20  # of one tool call
MAX_CONVERSATIONS: Final = 256
MAX_INCLUDED: Final = 32
MAX_INPUTS: Final = 2048  # OpenAI's
MAX_LEVELS: Final = 10
MAX_PROMPTS: Final = 256
MAX_QUESTIONS: Final = 400  # OpenAI's
MAX_TEMPLATE_KWARGS: Final = 64
MAX_TOOLS: Final = 512
ASSISTANT: Final = "assistant"
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Values of `include` in OpenAI's API. Only the first has an effect."""

_ANYBODY: Final = Ignored("the caller's identity changes nothing")
_BEAMS: Final = "there is no beam search; outputs are sampled or greedy"
_CACHED: Final = Ignored("common beginnings are cached in any case")
_CLEARS_NOTHING: Final = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_FOR_CLIENTS: Final = Ignored("it is for the client's own use")
_FOR_MESSAGES: Final = Ignored("only messages use it")
_NOT_READ: Final = Ignored("the model does not read it")
_NO_EXTENSION: Final = "there is no extension that would take it"
_NO_BEAMS: Final = Ignored("only beam search uses it")
_ONE_CLASS: Final = Ignored("there is one")
_OUTPUT_IS_TEXT: Final = "outputs are text, by the model alone"
_STATELESS: Final = "nothing is stored: send the whole conversation"
_SPECIAL_TOKENS: Final = "send token ids, which /tokenize makes without special tokens"
_TEXT_ONLY: Final = Ignored("messages are text")
_TRANSFERS: Final = "the server decides what its nodes transfer"
_VLLMS_OWN: Final = Ignored("it is a matter of vLLM's own")
_WHOLE_VOCABULARY: Final = "-1: of the whole vocabulary, within --max-logprobs"


_ModelName = Annotated[str | None, Field(description="a served name or a LoRA adapter; default: the served model")]
_CacheSalt = Annotated[
    Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None,
    Field(description="cached prefixes are shared by requests of one salt"),
]
_RequestId = Annotated[str | None, Field(description="the header X-Request-Id precedes it; default: a random id")]
_Priority = Annotated[
    int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="the lower the earlier; default 0")
]
_TemplateVariables = Annotated[
    Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None,
    Field(description="variables of the chat template"),
]
_IncludeReasoning = Annotated[bool | None, Field(description="false leaves thoughts out of the response; default true")]


def _ranged(name: str, about: str) -> Any:
    low, high = SAMPLING_RANGES[name]
    return Field(None, ge=low, le=high, description=about)


# ---- Parts that several APIs have ----

FunctionName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


def _check_parameters(parameters: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
    types = (parameters or {}).get("type", "object")
    if info.data.get("strict") and "object" not in (types if isinstance(types, list) else [types]):
        raise expected("a JSON schema of objects where strict is true")
    return parameters


class Function(Model):
    """A function that the output may call."""

    name: FunctionName
    description: str | None = None
    strict: bool | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_check_parameters)] = None


class _Part(Model):
    annotations: Annotated[Any, _NOT_READ] = None
    cache_control: Annotated[Any, _CACHED] = None
    citations: Annotated[Any, _NOT_READ] = None
    logprobs: Annotated[Any, _NOT_READ] = None
    prompt_cache_breakpoint: Annotated[Any, _CACHED] = None


class TextPart(_Part):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(_Part):
    type: Literal["refusal"]
    refusal: str


class ThinkingPart(Model):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Any, _NOT_READ] = None


class RedactedThinkingPart(Model):
    type: Literal["redacted_thinking"]
    data: Annotated[Any, Ignored("it is encrypted for its own server")] = None


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
AssistantPart = Annotated[TextPart | RefusalPart | ThinkingPart | RedactedThinkingPart, Field(discriminator="type")]
_CONTENT = by_json_type("a string or a list of text parts")
Content = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag(LIST)], _CONTENT]
AssistantContent = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[AssistantPart], Field(max_length=MAX_PARTS), Tag(LIST)], _CONTENT
]


def _check_arguments(value: Any) -> Any:
    """Check the arguments of an earlier call, which some clients send as an object and others as text."""
    if isinstance(value, str):
        if len(value) > MAX_ARGUMENTS_CHARS:
            raise fault(f"has {len(value)} characters, the limit is {MAX_ARGUMENTS_CHARS}")
        check_num_values(value.encode(errors="replace"))
    return value


Arguments = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[dict[str, Any], Tag(OBJECT)],
    by_json_type("a string of valid Unicode, or an object"),
    AfterValidator(_check_arguments),
]


class CalledFunction(Model):
    name: FunctionName
    arguments: Arguments | None = None


class ToolCall(Model):
    """A tool call of an earlier output."""

    type: Literal["function"] | None = None
    id: str | None = None
    index: Annotated[Any, _NOT_READ] = None
    function: CalledFunction


class _Message(Model):
    role: Annotated[str, Field(min_length=1)]
    name: str | None = None
    annotations: Annotated[Any, _NOT_READ] = None
    function_call: Annotated[Any, Refused("send tool_calls", {}, "")] = None
    reasoning: str | None = Field(None, description="vLLM's newer name of reasoning_content")
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS)


class OtherMessage(_Message):
    """A message of anybody but the assistant."""

    content: Content


class AssistantMessage(_Message):
    content: AssistantContent | None = None
    refusal: str | None = None


def _speaker(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return "#assistant" if value.get("role") == ASSISTANT else "#other"


Message = Annotated[
    Annotated[AssistantMessage, Tag("#assistant")] | Annotated[OtherMessage, Tag("#other")],
    Discriminator(_speaker, "expected", "an object"),
]
Conversation = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


# ---- Structured output ----


class JsonSchemaFormat(Model):
    name: Annotated[Any, _NOT_READ] = None
    description: Annotated[Any, _NOT_READ] = None
    strict: Annotated[Any, Ignored("a schema is enforced in any case")] = None
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    object_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="of json_object, as in llama.cpp and others"
    )
    json_schema: JsonSchemaFormat | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _check_json_schema(cls, value: JsonSchemaFormat | None, info: ValidationInfo) -> JsonSchemaFormat | None:
        if value is None and info.data.get("type") == "json_schema":
            raise expected("an object with a schema")
        return value


JsonSchema = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[dict[str, Any], Tag(OBJECT)],
    by_json_type("a JSON schema: an object, or its text"),
]


class StructuredOutputs(Model):
    """vLLM's structured_outputs: one of json, json_object, regex, choice and grammar."""

    json_value: JsonSchema | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = Field(None, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, description="Lark or EBNF")
    disable_fallback: Annotated[bool | None, Ignored("there is no fallback")] = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Annotated[Any, Refused("use json, regex or grammar", "", {})] = None
    backend: Annotated[Any, _VLLMS_OWN] = Field(None, alias="_backend")
    backend_was_auto: Annotated[Any, _VLLMS_OWN] = Field(None, alias="_backend_was_auto")


class StreamOptions(Model):
    include_usage: bool | None = Field(None, description="a last event has the usage")
    continuous_usage_stats: bool | None = Field(None, description="every event has the usage; needs include_usage")
    include_obfuscation: Annotated[Any, Ignored("events have no padding")] = None


# ---- Fields of every request that generates ----


class SamplingFields(Model):
    """Sampling fields of every API that generates."""

    temperature: float | None = _ranged("temperature", "0: greedy")
    top_p: float | None = _ranged("top_p", "the smallest set of tokens with this probability")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="the likeliest tokens; 0 and -1: all")
    min_p: float | None = _ranged("min_p", "at least this share of the likeliest token's probability")
    frequency_penalty: float | None = _ranged("frequency_penalty", "for each time that a token was generated")
    presence_penalty: float | None = _ranged("presence_penalty", "for a token that was generated")
    repetition_penalty: float | None = _ranged("repetition_penalty", "for a token of the prompt or the output")
    seed: Int64 | None = Field(None, description="default: a random one")
    stop_token_ids: TokenIds | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, description="tokens that end the output, besides the model's own"
    )
    ignore_eos: bool | None = Field(None, description="the model's end tokens do not end the output")
    min_tokens: Int32 | None = Field(None, description="no end token before so many; default 0")
    skip_special_tokens: bool | None = Field(None, description="default true")
    include_stop_str_in_output: bool | None = Field(None, description="default false")
    logit_bias: dict[str, float | None] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="by token id, within [-100, 100]"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="a form that the output has to have")

    @field_validator("logit_bias")
    @classmethod
    def _check_token_ids(cls, value: dict[str, float | None] | None) -> dict[str, float | None] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= len(str(2**32)) and int(key) < 2**32):
                raise fault(f"has the key {shown(key)}, which is no token id")
        return value


class Scheduled(RequestModel):
    """Fields of the requests that generate, whatever their API, but for sampling."""

    model: _ModelName = None
    cache_salt: _CacheSalt = None
    ttft_ms: float | None = Field(None, description="SLO on the time to the first token")
    tpot_ms: float | None = Field(None, description="SLO on the time per output token")
    slo_class: str | None = Field(None, description="SLO class, of those that the operator has set")
    priority: _Priority = None
    request_id: _RequestId = None
    service_tier: Annotated[str, Field(max_length=MAX_TIER_CHARS)] | None = Field(
        None, description="SLO class of this name, if the operator has set one and slo_class is not given"
    )
    ec_transfer_params: Annotated[Any, Refused(_TRANSFERS, {})] = None
    kv_transfer_params: Annotated[Any, Refused(_TRANSFERS, {})] = None


class Generating(SamplingFields, Scheduled):
    """Fields of the requests that generate and have sampling fields of their own."""

    beam_width: Annotated[Any, Refused(_BEAMS, 1)] = None
    num_beams: Annotated[Any, Refused(_BEAMS, 1)] = None
    use_beam_search: Annotated[Any, Refused(_BEAMS, False)] = None
    vllm_xargs: Annotated[Any, Refused(_NO_EXTENSION, {})] = None


_Stop = Annotated[
    Annotated[Texts, Field(max_length=MAX_STOP_STRINGS)] | None,
    Field(description=f"up to {MAX_STOP_STRINGS} texts of up to {MAX_STOP_CHARS} characters that end the output"),
]
_BadWords = Annotated[
    Annotated[Texts, Field(max_length=MAX_BAD_WORDS)] | None,
    Field(description="as the tokenizer splits them, at a beginning and behind a space, as in vLLM"),
]
_LogprobTokenIds = Annotated[
    Annotated[TokenIds, Field(max_length=MAX_LOGPROB_TOKEN_IDS)] | None,
    Field(description="needs logprobs, which are then of these tokens, not of the likeliest"),
]
_AllowedTokenIds = Annotated[
    Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None,
    Field(description="no other token is generated, not even an end token; logprobs are those of all tokens"),
]
_NO_WATERMARK: Final = Refused("outputs have no watermark", False)
_NO_THINKING_BUDGET: Final = Refused("thoughts and text share max_tokens", -1)
_NO_REPETITION_DETECTION: Final = Refused("use the penalties", {})
_NO_ROUTING: Final = Ignored("the routing of experts is not returned")
_NO_SPACES: Final = Ignored("there are none")
_NO_INTERVAL: Final = Ignored("an event has the tokens that have come until then")


class _OfOpenAI(Generating):
    """Fields of OpenAI's requests that generate."""

    stop: _Stop = None
    user: Annotated[Any, _ANYBODY] = None
    safety_identifier: Annotated[Any, _ANYBODY] = None
    prompt_cache_key: Annotated[Any, _CACHED] = None
    prompt_cache_options: Annotated[Any, _CACHED] = None
    prompt_cache_retention: Annotated[Any, _CACHED] = None
    session_id: Annotated[Any, _CACHED] = None


class CompletionFields(_OfOpenAI):
    """Fields of completions and chat completions."""

    n: Any = None
    prompt_logprobs: Any = None
    stream: Any = None
    stream_options: Any = None
    response_format: ResponseFormat | None = Field(None, description="a form that the output has to have, as OpenAI's")
    include_timeline: bool | None = Field(None, description="the response has the times of its phases")
    bad_words: _BadWords = None
    logprob_token_ids: _LogprobTokenIds = None
    allowed_token_ids: _AllowedTokenIds = None
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="so many of the prompt's tokens are kept; -1: as there is room for"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="left keeps the last tokens, right the first; default left"
    )
    return_tokens_as_token_ids: bool | None = Field(None, description="tokens are `token_id:7` in logprobs")
    return_token_ids: bool | None = Field(None, description="in a batch, those of the outputs alone")
    metadata: Annotated[Any, _FOR_CLIENTS] = None
    store: Annotated[Any, Ignored("no output is stored")] = None
    length_penalty: Annotated[Any, _NO_BEAMS] = None
    early_stopping: Annotated[Any, _NO_BEAMS] = None
    spaces_between_special_tokens: Annotated[Any, _NO_SPACES] = None
    stream_interval: Annotated[Any, _NO_INTERVAL] = None
    guided_decoding_backend: Annotated[Any, _ONE_CLASS] = None
    return_token_offsets: Annotated[Any, Ignored("only rendering uses it, in vLLM too")] = None
    return_mm_kwargs: Annotated[Any, Ignored("only rendering uses it, in vLLM too")] = None
    routed_experts_prompt_start: Annotated[Any, _NO_ROUTING] = None
    best_of: Annotated[Any, Refused("n outputs are generated and returned", 1, same_as="n")] = None
    ebnf: Annotated[Any, Refused("it is grammar of structured_outputs", "")] = None
    grammar: Annotated[Any, Refused("it is grammar of structured_outputs", "")] = None
    guided_choice: Annotated[Any, Refused("it is choice of structured_outputs")] = None
    guided_grammar: Annotated[Any, Refused("it is grammar of structured_outputs")] = None
    guided_json: Annotated[Any, Refused("it is json of structured_outputs")] = None
    guided_regex: Annotated[Any, Refused("it is regex of structured_outputs")] = None
    guided_whitespace_pattern: Annotated[Any, Refused("it is whitespace_pattern of structured_outputs")] = None
    json_schema: Annotated[Any, Refused("it is json of structured_outputs")] = None
    regex: Annotated[Any, Refused("it is regex of structured_outputs", "")] = None
    logits_processors: Annotated[Any, Refused("no code of clients is run", [])] = None
    prompt_embeds: Annotated[Any, Refused("a prompt is text or tokens")] = None
    repetition_detection: Annotated[Any, _NO_REPETITION_DETECTION] = None
    suffix: Annotated[Any, Refused("the output follows the prompt", "")] = None
    thinking_token_budget: Annotated[Any, _NO_THINKING_BUDGET] = None
    watermarking: Annotated[Any, _NO_WATERMARK] = None


_Count = Annotated[int | None, Field(ge=1, le=MAX_ANSWERS, description="sequences of each prompt; default 1")]
_PromptLogprobs = Annotated[
    int | None,
    Field(ge=-1, le=2**31 - 1, description="the k likeliest tokens of each position; not in a stream; -1: all"),
]
_Stream = Annotated[bool | None, Field(description="the output comes as events; default false")]
_NewestUsage = Annotated[StreamOptions | None, Field(description="needs stream")]


# ---- Completions and embeddings ----


def _kind_of_prompts(value: Any) -> str | None:
    if not isinstance(value, list):
        return TEXT if isinstance(value, str) else None
    return "#texts" if isinstance(value[0], str) else "#lists" if isinstance(value[0], list) else "#ids"


def _limit_prompts(limit: int) -> BeforeValidator:
    """Return a validator of the number of prompts, before any of them is read."""

    def check(value: Any) -> Any:
        if value == []:
            raise fault("is empty: send a string, token ids, or a list of either")
        if isinstance(value, list) and isinstance(value[0], str | list) and len(value) > limit:
            raise fault(f"has {len(value)} entries, the limit is {limit}")
        return value

    return BeforeValidator(check)


Prompts = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Tag("#texts")]
    | Annotated[TokenIds, Tag("#ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("#lists")],
    Discriminator(_kind_of_prompts, "expected", "a string, token ids, or a list of either"),
]


class CompletionRequest(CompletionFields):
    """A call of /v1/completions."""

    n: _Count = None
    prompt: Annotated[Prompts, _limit_prompts(MAX_PROMPTS)] = Field(description="text, token ids, or a list of either")
    max_tokens: Int32 | None = Field(
        None, description="default 16, as OpenAI's, or what the prompt leaves room for; 0 with echo alone"
    )
    logprobs: int | None = Field(None, ge=-1, le=2**31 - 1, description=f"the likeliest tokens; {_WHOLE_VOCABULARY}")
    prompt_logprobs: _PromptLogprobs = None
    echo: bool | None = Field(None, description="the text begins with the prompt; default false")
    stream: _Stream = None
    stream_options: _NewestUsage = None
    add_special_tokens: Annotated[Any, Refused(_SPECIAL_TOKENS, True)] = None


class EmbeddingsRequest(RequestModel):
    """A call of /v1/embeddings."""

    model: _ModelName = None
    input: Annotated[Prompts, _limit_prompts(MAX_INPUTS)] = Field(description="text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="default float")
    dimensions: int | None = Field(
        None, ge=0, le=2**31 - 1, description="of a model whose config.json has is_matryoshka or matryoshka_dimensions"
    )
    normalize: bool | None = Field(None, description="to length 1; default: as the model's folder says")
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="the first tokens are kept; -1: as many as there is room for"
    )
    cache_salt: _CacheSalt = None
    priority: _Priority = None
    request_id: _RequestId = None
    user: Annotated[Any, _ANYBODY] = None
    safety_identifier: Annotated[Any, _ANYBODY] = None
    additional_data: Annotated[Any, _FOR_CLIENTS] = None
    service_tier: Annotated[Any, _ONE_CLASS] = None
    media_io_kwargs: Annotated[Any, _TEXT_ONLY] = None
    mm_processor_kwargs: Annotated[Any, _TEXT_ONLY] = None
    add_generation_prompt: Annotated[Any, _FOR_MESSAGES] = None
    continue_final_message: Annotated[Any, _FOR_MESSAGES] = None
    chat_template: Annotated[Any, _FOR_MESSAGES] = None
    chat_template_kwargs: Annotated[Any, _FOR_MESSAGES] = None
    add_special_tokens: Annotated[Any, Refused(_SPECIAL_TOKENS, True)] = None
    embed_dtype: Annotated[Any, Refused("vectors are float32", "float32")] = None
    endianness: Annotated[Any, Refused("vectors are little-endian, as OpenAI's", "native", "little")] = None
    messages: Annotated[Any, Refused("send input: /tokenize returns the token ids of a conversation", [])] = None
    truncation_side: Annotated[Any, Refused("the first tokens are kept", "right")] = None
    use_activation: Annotated[Any, Refused("it is normalize")] = None


# ---- Chat completions and /tokenize ----


class Tool(Model):
    type: Literal["function"] | None = None
    function: Function


class NamedFunction(Model):
    name: FunctionName


class NamedTool(Model):
    type: Literal["function"] | None = None
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedTool, Tag(OBJECT)],
    by_json_type("none, auto, required or one of the tools"),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateFields(RequestModel):
    """Fields of a chat template."""

    reasoning_effort: Effort | None = Field(
        None, description="for the chat template, with enable_thinking: false for none"
    )
    add_generation_prompt: bool | None = Field(None, description="default true, unless a message is continued")
    continue_final_message: bool | None = Field(None, description="the output goes on with the last message")
    chat_template_kwargs: _TemplateVariables = None
    media_io_kwargs: Annotated[Any, _TEXT_ONLY] = None
    mm_processor_kwargs: Annotated[Any, _TEXT_ONLY] = None
    chat_template: Annotated[Any, Refused("templates are the operator's (--chat-template)")] = None
    documents: Annotated[Any, Refused("chat_template_kwargs hands them to a template that knows them", [])] = None


class ChatFields(CompletionFields, TemplateFields):
    """Fields of chat completions and of batches of them."""

    max_tokens: Int32 | None = Field(None, description="default: what the prompt leaves room for")
    max_completion_tokens: Int32 | None = Field(
        None, description="OpenAI's newer name of max_tokens, which it precedes"
    )
    logprobs: bool | None = Field(None, description="of the output's tokens; default false")
    top_logprobs: int | None = Field(None, ge=-1, le=2**31 - 1, description=f"needs logprobs; {_WHOLE_VOCABULARY}")
    echo: bool | None = Field(
        None, description="the output begins with the last message, if that is the assistant's, as in vLLM"
    )
    include_reasoning: _IncludeReasoning = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    prediction: Annotated[Any, Ignored("it would only make the response faster")] = None
    add_special_tokens: Annotated[Any, Refused("the chat template writes them", False)] = None
    audio: Annotated[Any, Refused(_OUTPUT_IS_TEXT)] = None
    web_search_options: Annotated[Any, Refused(_OUTPUT_IS_TEXT)] = None
    function_call: Annotated[Any, Refused("it is tool_choice", "none", "auto")] = None
    functions: Annotated[Any, Refused("they are tools", [])] = None
    modalities: Annotated[Any, Refused("outputs are text", ["text"])] = None
    moderation: Annotated[Any, Refused("nothing is moderated")] = None
    return_prompt_text: Annotated[
        Any, Refused("return_token_ids returns the prompt's tokens, /detokenize their text", False)
    ] = None
    verbosity: Annotated[Any, Refused("say it in a message", "medium")] = None


class ChatRequest(ChatFields):
    """A call of /v1/chat/completions."""

    n: _Count = None
    messages: Conversation
    prompt_logprobs: _PromptLogprobs = None
    stream: _Stream = None
    stream_options: _NewestUsage = None
    tools: Tools | None = Field(None, description="functions that the output may call")
    tool_choice: ToolChoice | None = Field(None, description="default auto")
    parallel_tool_calls: bool | None = Field(None, description="default true")


class BatchRequest(ChatFields):
    """A call of /v1/chat/completions/batch."""

    n: Annotated[Any, Refused("each conversation has one output", 1)] = None
    messages: list[Conversation] = Field(
        min_length=1,
        max_length=MAX_CONVERSATIONS,
        description="a list of conversations; the choices are their outputs, in their order",
    )
    prompt_logprobs: Annotated[Any, Refused("they are returned of a single conversation only")] = None
    stream: Annotated[Any, Refused("the outputs of a batch come together", False)] = None
    stream_options: Annotated[Any, Refused("the outputs of a batch come together")] = None
    tools: Annotated[Any, Refused("a batch has no tools", [])] = None
    tool_choice: Annotated[Any, Refused("a batch has no tools", "none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Refused("a batch has no tools", True, False)] = None


class TokenizeRequest(TemplateFields):
    """A call of /tokenize: for `prompt`, or for `messages` and the fields of a chat template."""

    model: _ModelName = None
    prompt: str | None = Field(None, description="a text, in place of messages")
    messages: Conversation | None = Field(None, description="a conversation, in place of a prompt")
    tools: Tools | None = Field(None, description="functions that the chat template shows")
    add_special_tokens: bool | None = Field(None, description="of a prompt; true is refused for messages; default true")
    return_token_strs: bool | None = Field(None, description="default false")


class DetokenizeRequest(RequestModel):
    """A call of /detokenize."""

    model: _ModelName = None
    tokens: TokenIds


# ---- OpenAI's responses ----


class _Item(Model):
    id: Annotated[Any, _NOT_READ] = None
    status: Annotated[Any, _NOT_READ] = None
    phase: Annotated[Any, _NOT_READ] = None
    summary: Annotated[Any, _NOT_READ] = None
    encrypted_content: Annotated[Any, _NOT_READ] = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    namespace: Annotated[Any, _NOT_READ] = None
    call_id: str | None = None
    name: FunctionName
    arguments: Arguments | None = None


class FunctionOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content


class ReasoningText(_Part):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(None, max_length=MAX_PARTS)


def _with_type(value: Any) -> Any:
    return value if not isinstance(value, dict) or value.get("type") else {**value, "type": "message"}


Item = Annotated[
    Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_with_type),
]


class TextFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Any, _NOT_READ] = None
    description: Annotated[Any, _NOT_READ] = None
    strict: Annotated[Any, Ignored("a schema is enforced in any case")] = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema", validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, value: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if value is None and info.data.get("type") == "json_schema":
            raise expected("a JSON schema: an object")
        return value


class TextOptions(Model):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Refused("say it in a message", "medium")] = None


class ReasoningOptions(Model):
    effort: Effort | None = Field(None, description="as reasoning_effort of a chat completion")
    summary: Annotated[str | None, Ignored("thoughts are returned as they are")] = None
    generate_summary: Annotated[str | None, Ignored("thoughts are returned as they are")] = None


class _TypedFunction(Model):
    type: Literal["function"]


class ResponsesTool(Function, _TypedFunction):
    """A function that the output may call; a fault of `type`, the last base's, is named first."""


class ResponsesNamedTool(NamedFunction, _TypedFunction):
    pass


class ResponsesRequest(_OfOpenAI):
    """A call of /v1/responses."""

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[Item], Field(max_length=MAX_MESSAGES), Tag(LIST)],
        by_json_type("a string, or a list of items"),
    ]
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="default: what the prompt leaves room for"
    )
    stream: _Stream = None
    text: TextOptions | None = Field(None, description="format as response_format of a chat completion")
    reasoning: ReasoningOptions | None = Field(None, description="effort, as reasoning_effort of a chat completion")
    tools: list[ResponsesTool] | None = Field(
        None, max_length=MAX_TOOLS, description="functions that the output may call"
    )
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[ResponsesNamedTool, Tag(OBJECT)],
            by_json_type("none, auto, required or one of the tools"),
        ]
        | None
    ) = Field(None, description="default auto")
    parallel_tool_calls: bool | None = Field(None, description="default true")
    include: Texts | None = Field(
        None, max_length=MAX_INCLUDED, description=f"{LOGPROBS}; a response has nothing of what else OpenAI has here"
    )
    top_logprobs: int | None = Field(None, ge=-1, le=2**31 - 1, description=f"of the text; needs {LOGPROBS} in include")
    chat_template_kwargs: _TemplateVariables = None
    include_reasoning: _IncludeReasoning = None
    metadata: dict[str, Any] | None = Field(None, description="the response repeats it")
    access_programs: Annotated[Any, Ignored("there are none")] = None
    image: Annotated[Any, _TEXT_ONLY] = None
    max_tool_calls: Annotated[Any, Ignored("it is of built-in tools")] = None
    media_io_kwargs: Annotated[Any, _TEXT_ONLY] = None
    mm_processor_kwargs: Annotated[Any, _TEXT_ONLY] = None
    stream_options: Annotated[Any, Ignored("events have no padding")] = None
    background: Annotated[Any, Refused("a response comes while its client waits", False)] = None
    background_options: Annotated[Any, Refused("a response comes while its client waits")] = None
    context_management: Annotated[Any, Refused("send what the model is to read", [])] = None
    conversation: Annotated[Any, Refused(_STATELESS)] = None
    enable_response_messages: Annotated[Any, Refused("the response has output, and no messages", False)] = None
    moderation: Annotated[Any, Refused("nothing is moderated")] = None
    previous_input_messages: Annotated[Any, Refused("send them in input", [])] = None
    previous_response: Annotated[Any, Refused("send its output in input")] = None
    previous_response_id: Annotated[Any, Refused(_STATELESS)] = None
    prompt: Annotated[Any, Refused("no prompts are stored")] = None
    store: Annotated[Any, Refused("no output is stored", False)] = None
    truncation: Annotated[Any, Refused("send what there is room for", "disabled")] = None

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        for unknown in set(value or ()).difference(INCLUDABLE):
            raise fault(f"({shown(unknown)}) is not supported: it may name {', '.join(INCLUDABLE)}")
        return value


# ---- Anthropic's messages ----


class AnthropicText(_Part):
    type: Literal["text"]
    text: str


class Citations(Model):
    enabled: Annotated[Any, Refused("the output has only the model's words", False)] = None


_TEXT_OR_BLOCKS: Final = by_json_type("a string or a list of blocks")


class TextSource(Model):
    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str


class ContentSource(Model):
    type: Literal["content"]
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)] | Annotated[list[AnthropicText], Field(max_length=MAX_PARTS), Tag(LIST)],
            _TEXT_OR_BLOCKS,
        ]
        | None
    ) = None


class Document(Model):
    type: Literal["document"]
    title: str | None = None
    context: str | None = None
    source: TextSource | ContentSource = Field(discriminator="type")
    citations: Citations | None = None
    cache_control: Annotated[Any, _CACHED] = None


Block = Annotated[AnthropicText | Document, Field(discriminator="type")]
Blocks = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Block], Field(max_length=MAX_PARTS), Tag(LIST)], _TEXT_OR_BLOCKS
]


class ToolResult(Model):
    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: Blocks | None = None
    is_error: bool | None = None
    cache_control: Annotated[Any, _CACHED] = None


class ToolUse(Model):
    type: Literal["tool_use"]
    id: str | None = None
    name: FunctionName
    input: dict[str, Any]
    cache_control: Annotated[Any, _CACHED] = None
    caller: Annotated[Any, _NOT_READ] = None


UserBlock = Annotated[AnthropicText | Document | ToolResult, Field(discriminator="type")]
AssistantBlock = Annotated[AnthropicText | ThinkingPart | RedactedThinkingPart | ToolUse, Field(discriminator="type")]


class UserTurn(Model):
    role: Literal["user", "system"]
    content: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[UserBlock], Field(min_length=1, max_length=MAX_PARTS), Tag(LIST)],
        _TEXT_OR_BLOCKS,
    ]


class AssistantTurn(Model):
    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[AssistantBlock], Field(max_length=MAX_PARTS), Tag(LIST)],
        _TEXT_OR_BLOCKS,
    ]


Turn = Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]


class AnthropicTool(Model):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    strict: bool | None = None
    input_schema: Annotated[dict[str, Any] | None, AfterValidator(_check_parameters)] = None
    cache_control: Annotated[Any, _CACHED] = None
    eager_input_streaming: Annotated[Any, Ignored("the input of a tool comes as it is generated")] = None
    input_examples: Annotated[Any, _NOT_READ] = None


class AnthropicToolChoice(Model):
    type: Literal["auto", "any", "none", "tool"]
    name: FunctionName | None = Field(None, validate_default=True)
    disable_parallel_tool_use: bool | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") == "tool":
            raise expected("the name of a tool")
        return value


class Thinking(Model):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Any, Ignored("it is a target, not a limit")] = None
    display: Annotated[Any, Ignored("thoughts are returned as they are")] = None


class OutputFormat(Model):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    effort: Effort | None = Field(None, description="as reasoning_effort of a chat completion")
    format: OutputFormat | None = None


class MessagesRequest(Generating):
    """A call of /v1/messages."""

    system: Blocks | None = Field(None, description="a system message before the messages")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="default: what the prompt leaves room for")
    stop_sequences: _Stop = None
    stream: _Stream = None
    tools: list[AnthropicTool] | None = Field(
        None, max_length=MAX_TOOLS, description="functions that the output may call"
    )
    tool_choice: AnthropicToolChoice | None = Field(None, description="default auto")
    thinking: Thinking | None = Field(None, description="enable_thinking of the chat template")
    output_config: OutputConfig | None = Field(None, description="effort and format of the output")
    chat_template_kwargs: _TemplateVariables = None
    include_reasoning: _IncludeReasoning = None
    cache_control: Annotated[Any, _CACHED] = None
    diagnostics: Annotated[Any, Ignored("the response has all there is")] = None
    metadata: Annotated[Any, _FOR_CLIENTS] = None
    billing_policy: Annotated[Any, Ignored("nothing is billed")] = None
    fallback_credit_token: Annotated[Any, Ignored("nothing is billed")] = None
    fallbacks: Annotated[Any, Ignored("the model answers each request, or an error does")] = None
    speed: Annotated[Any, _ONE_CLASS] = None
    user_profile_id: Annotated[Any, _ANYBODY] = None
    workspace_id: Annotated[Any, _ANYBODY] = None
    container: Annotated[Any, Refused("tools are the client's own", [])] = None
    mcp_servers: Annotated[Any, Refused("tools are the client's own", [])] = None
    inference_geo: Annotated[Any, Refused("the server does not know its place")] = None
    thread: Annotated[Any, Refused(_STATELESS)] = None
    compaction: Annotated[Any, Refused("the server summarizes nothing")] = None
    context_management: Annotated[
        Any, Refused("send what the model is to read", {}, {"edits": []}, _CLEARS_NOTHING)
    ] = None
    output_format: Annotated[Any, Refused("it is format of output_config")] = None


# ---- Token ids in and out: vLLM's /inference/v1/generate ----


class TokensSampling(SamplingFields):
    """Sampling fields of /inference/v1/generate."""

    n: _Count = None
    max_tokens: Int32 | None = Field(None, description="default: what the prompt leaves room for")
    stop: _Stop = None
    logprobs: int | None = Field(None, ge=-1, le=2**31 - 1, description=f"the likeliest tokens; {_WHOLE_VOCABULARY}")
    prompt_logprobs: _PromptLogprobs = None
    bad_words: _BadWords = None
    logprob_token_ids: _LogprobTokenIds = None
    allowed_token_ids: _AllowedTokenIds = None
    detokenize: Annotated[Any, Ignored("output_mode says whether the response has text")] = None
    flat_logprobs: Annotated[Any, _VLLMS_OWN] = None
    output_kind: Annotated[Any, Ignored("stream says whether the output comes in parts")] = None
    routed_experts_prompt_start: Annotated[Any, _NO_ROUTING] = None
    skip_clone: Annotated[Any, _VLLMS_OWN] = None
    skip_reading_prefix_cache: Annotated[Any, Ignored("outputs do not depend on the prefix cache")] = None
    spaces_between_special_tokens: Annotated[Any, _NO_SPACES] = None
    stream_interval: Annotated[Any, _NO_INTERVAL] = None
    extra_args: Annotated[Any, Refused(_NO_EXTENSION, {})] = None
    prompt_logprob_start: Annotated[Any, Refused("logprobs are of the whole prompt", 0)] = None
    prompt_logprob_token_ids: Annotated[Any, Refused("send prompt_logprobs", [])] = None
    repetition_detection: Annotated[Any, _NO_REPETITION_DETECTION] = None
    thinking_token_budget: Annotated[Any, _NO_THINKING_BUDGET] = None
    trace_decode_token_ids: Annotated[Any, Refused("outputs are sampled or greedy", [])] = None
    watermarking: Annotated[Any, _NO_WATERMARK] = None


class TokensRequest(Scheduled):
    """A call of /inference/v1/generate."""

    token_ids: Annotated[TokenIds, Field(min_length=1, description="the prompt")]
    sampling_params: TokensSampling
    output_mode: Literal["tokens", "text"] | None = Field(
        None, description="text: the response has the text too, and logprobs as in a chat completion; default tokens"
    )
    return_token_ids: bool | None = Field(None, description="the response has the prompt's token ids; default false")
    reasoning_ended: bool | None = Field(
        None, description="true: structured_outputs holds from the first token, without thoughts before it"
    )
    stream: _Stream = None
    stream_options: _NewestUsage = None
    prompt_text: Annotated[Any, Ignored("token_ids are the prompt")] = None
    reasoning_parser_kwargs: Annotated[Any, Ignored("token_ids show whether the output begins with thoughts")] = None
    token_offsets: Annotated[Any, Ignored("token_ids are the prompt")] = None
    content_parts: Annotated[Any, Refused("the prompt is token ids", [])] = None
    features: Annotated[Any, Refused("the prompt is token ids", {})] = None


# ---- Decisions, scores and rankings: probabilities of replies, without text ----


class Scoring(RequestModel):
    """Fields of the requests that are answered with probabilities of replies."""

    model: _ModelName = None
    cache_salt: _CacheSalt = None
    ttft_ms: float | None = Field(None, description="SLO on the time to the response")
    slo_class: str | None = Field(None, description="SLO class, of those that the operator has set")
    priority: _Priority = None
    request_id: _RequestId = None
    user: Annotated[Any, _ANYBODY] = None
    safety_identifier: Annotated[Any, _ANYBODY] = None


def _as_text(value: Any) -> Any:
    """Return a part of JSON as a part of text, any other value as it is."""
    if not isinstance(value, dict) or value.get("type") != "input_json":
        return value
    data = value.get("data")
    if not isinstance(data, dict) and not (isinstance(data, list) and all(isinstance(each, dict) for each in data)):
        raise fault("must have data: an object or a list of objects")
    return {"type": "input_text", "text": json_text(data)}


def _as_item(value: Any) -> Any:
    """Return an item of a decision's input as an item of a response's input; a custom tool is a function."""
    value = _with_type(value)
    if not isinstance(value, dict):
        return value
    kind = value["type"]
    if kind == "custom_tool_call":
        return {**value, "type": "function_call", "input": None, "arguments": json_text({"input": value.get("input")})}
    field = "content" if kind == "message" else "output"
    parts = value.get(field)
    if isinstance(parts, list):
        value = {**value, field: list(map(_as_text, parts))}
    return {**value, "type": "function_call_output"} if kind == "custom_tool_call_output" else value


def json_text(value: Any) -> str:
    """Return JSON as the model reads it. Raises the error of a validator for a value that JSON cannot have."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise fault("is nested too deeply, or has strings that are no valid Unicode") from error
    return text


DecisionItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem, Field(discriminator="type"), BeforeValidator(_as_item)
]
QuestionText = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[Annotated[TextPart, BeforeValidator(_as_text)]], Field(max_length=MAX_PARTS), Tag(LIST)],
    _CONTENT,
]


class _Question(Model):
    instructions: QuestionText
    name: str | None = None


class Predicate(_Question):
    type: Literal["predicate"]


class ChoiceOption(Model):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(_Question):
    type: Literal["choice"]
    choices: list[ChoiceOption] = Field(min_length=2, max_length=MAX_LABELS)

    @field_validator("choices")
    @classmethod
    def _check_choices(cls, value: list[ChoiceOption]) -> list[ChoiceOption]:
        if len({(type(each.value), each.value) for each in value}) < len(value):
            raise fault("has a value twice")
        return value


class ScoreLevel(Model):
    label: str
    description: str | None = None


class ScoreQuestion(_Question):
    type: Literal["score"]
    levels: list[ScoreLevel] = Field(min_length=2, max_length=MAX_LEVELS)


Question = Annotated[Predicate | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionsRequest(Scoring):
    """A call of /v1/decisions."""

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[DecisionItem], Field(max_length=MAX_MESSAGES), Tag(LIST)],
        by_json_type("a string, or a list of items"),
    ] = Field(description="what the questions are about")
    questions: list[Question] = Field(min_length=1, max_length=MAX_QUESTIONS)
    prompt_cache_key: Annotated[Any, _CACHED] = None
    prompt_cache_options: Annotated[Any, _CACHED] = None


class Noul(Model):
    type: Literal["noul"]
    instructions: Any = None
    criteria: dict[Literal["true", "false"], Any] | None = None


class SystemOneChoice(Model):
    type: Literal["choice"]
    instructions: Any = None
    criteria: dict[str, Any] = Field(min_length=2, max_length=MAX_LABELS)


class SystemOneScore(Model):
    type: Literal["score"]
    instructions: Any = None
    criteria: list[Any] = Field(min_length=2, max_length=MAX_LEVELS)


SystemOneQuestion = Annotated[Noul | SystemOneChoice | SystemOneScore, Field(discriminator="type")]


class SystemOneRequest(Scoring):
    """A call of /v1/systemone."""

    state: Any = Field(description="what the questions are about: text or JSON")
    questions: dict[str, SystemOneQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS, description="by name")
    instructions: str | None = Field(None, description="a system message before the state")
    chat_template_kwargs: _TemplateVariables = None
    decision_template: Annotated[Any, Refused("templates are the operator's (--chat-template)")] = None
    seed: Annotated[Any, Ignored("nothing is drawn")] = None


class _Ranking(Scoring):
    """Fields of scores and rankings."""

    instruction: str | None = Field(None, description="what makes a document relevant, for the model")
    chat_template_kwargs: _TemplateVariables = None
    mm_processor_kwargs: Annotated[Any, _TEXT_ONLY] = None
    max_tokens_per_doc: Annotated[Any, Refused("send what is to be read")] = None
    truncate_prompt_tokens: Annotated[Any, Refused("send what is to be read")] = None
    truncation_side: Annotated[Any, Refused("send what is to be read")] = None
    use_activation: Annotated[Any, Refused("scores are probabilities", True)] = None
    activation: Annotated[Any, Refused("scores are probabilities", True)] = None
    softmax: Annotated[Any, Refused("scores are probabilities", True)] = None


_Scored = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag(LIST)],
    by_json_type("a string or a list of strings"),
]


class ScorePairsRequest(_Ranking):
    """A call of /v1/score."""

    text_1: _Scored | None = Field(None, description="queries; one for all documents, or one for each")
    text_2: _Scored | None = Field(None, description="documents")
    queries: _Scored | None = Field(None, description="newer name of text_1")
    documents: _Scored | None = Field(None, description="newer name of text_2")
    data_1: Annotated[Any, Refused("it is text_1")] = None
    data_2: Annotated[Any, Refused("it is text_2")] = None


class RerankRequest(_Ranking):
    """A call of /v1/rerank."""

    query: str
    documents: list[str] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    top_n: int | None = Field(None, ge=0, le=2**31 - 1, description="default, and 0: all")
    return_documents: bool | None = Field(None, description="default true")


# ---- LoRA adapters ----


class LoadAdapterRequest(RequestModel):
    """A call of /v1/load_lora_adapter."""

    lora_name: str = Field(description="the name that requests give as their model")
    lora_path: str = Field(description="a folder within --lora-root, on the machine of every node, or relative to it")
    load_inplace: Annotated[Any, Refused("unload the adapter first", False)] = None
    is_3d_lora_weight: Annotated[Any, Refused("adapters of experts are not supported", False)] = None


class UnloadAdapterRequest(RequestModel):
    """A call of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Annotated[Any, Ignored("the name says which adapter it is")] = None


ENDPOINTS: Final[dict[str, type[RequestModel]]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/batch": BatchRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/decisions": DecisionsRequest,
    "/v1/systemone": SystemOneRequest,
    "/v1/score": ScorePairsRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/inference/v1/generate": TokensRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
