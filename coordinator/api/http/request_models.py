"""Declare the requests of the HTTP API: each field of OpenAI, Anthropic and vLLM, and the structured-output fields of
SGLang and llama.cpp, with its type, bounds, default and meaning.

The API validates by these declarations, and docs/reference/fields.md, /openapi.json and /docs come from them. An
unsupported field that would change the output is `Refused`; a field that cannot change it is `Ignored`. A field that is
not declared is unknown: the client gets a warning or an error (coordinator/api/unknown_fields.py).

Values that depend on the model or the fleet are checked where the gRPC API checks them (coordinator/api/validation.py),
which also fills in the sampling defaults of the model's folder (coordinator/served_model.py). The bounds of sampling
fields are `SAMPLING_RANGES` (serving_core/requests.py).
"""

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
MAX_INPUTS: Final = 2048  # OpenAI's
MAX_PROMPTS: Final = 256
MAX_TEMPLATE_KWARGS: Final = 64
MAX_TOOLS: Final = 512
ASSISTANT: Final = "assistant"

ANYBODY: Final = Ignored("the caller's identity changes nothing")
_BEAMS: Final = "there is no beam search; outputs are sampled or greedy"
CACHED: Final = Ignored("common beginnings are cached in any case")
FOR_CLIENTS: Final = Ignored("it is for the client's own use")
_FOR_MESSAGES: Final = Ignored("only messages use it")
NOT_READ: Final = Ignored("the model does not read it")
_NO_EXTENSION: Final = "there is no extension that would take it"
_NO_BEAMS: Final = Ignored("only beam search uses it")
ONE_CLASS: Final = Ignored("there is one")
_OUTPUT_IS_TEXT: Final = "outputs are text, by the model alone"
STATELESS: Final = "nothing is stored: send the whole conversation"
_SPECIAL_TOKENS: Final = "send token ids, which /tokenize makes without special tokens"
TEXT_ONLY: Final = Ignored("messages are text")
_TRANSFERS: Final = "the server decides what its nodes transfer"
_VLLMS_OWN: Final = Ignored("it is a matter of vLLM's own")
_WHOLE_VOCABULARY: Final = "-1: of the whole vocabulary, within --max-logprobs"


ModelName = Annotated[str | None, Field(description="a served name or a LoRA adapter; default: the served model")]
CacheSalt = Annotated[
    Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None,
    Field(description="cached prefixes are shared by requests of one salt"),
]
RequestId = Annotated[str | None, Field(description="the header X-Request-Id precedes it; default: a random id")]
Priority = Annotated[
    int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="the lower the earlier; default 0")
]
TemplateVariables = Annotated[
    Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None,
    Field(description="variables of the chat template"),
]
IncludeReasoning = Annotated[bool | None, Field(description="false leaves thoughts out of the response; default true")]


def _ranged(name: str, about: str) -> Any:
    low, high = SAMPLING_RANGES[name]
    return Field(None, ge=low, le=high, description=about)


# ---- Parts that several APIs have ----

FunctionName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


def check_parameters(parameters: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
    types = (parameters or {}).get("type", "object")
    if info.data.get("strict") and "object" not in (types if isinstance(types, list) else [types]):
        raise expected("a JSON schema of objects where strict is true")
    return parameters


class Function(Model):
    """A function that the output may call."""

    name: FunctionName
    description: str | None = None
    strict: bool | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(check_parameters)] = None


class ContentPart(Model):
    annotations: Annotated[Any, NOT_READ] = None
    cache_control: Annotated[Any, CACHED] = None
    citations: Annotated[Any, NOT_READ] = None
    logprobs: Annotated[Any, NOT_READ] = None
    prompt_cache_breakpoint: Annotated[Any, CACHED] = None


class TextPart(ContentPart):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(ContentPart):
    type: Literal["refusal"]
    refusal: str


class ThinkingPart(Model):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Any, NOT_READ] = None


class RedactedThinkingPart(Model):
    type: Literal["redacted_thinking"]
    data: Annotated[Any, Ignored("it is encrypted for its own server")] = None


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
AssistantPart = Annotated[TextPart | RefusalPart | ThinkingPart | RedactedThinkingPart, Field(discriminator="type")]
CONTENT = by_json_type("a string or a list of text parts")
Content = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag(LIST)], CONTENT]
AssistantContent = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[AssistantPart], Field(max_length=MAX_PARTS), Tag(LIST)], CONTENT
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
    index: Annotated[Any, NOT_READ] = None
    function: CalledFunction


class _Message(Model):
    role: Annotated[str, Field(min_length=1)]
    name: str | None = None
    annotations: Annotated[Any, NOT_READ] = None
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
    name: Annotated[Any, NOT_READ] = None
    description: Annotated[Any, NOT_READ] = None
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

    model: ModelName = None
    cache_salt: CacheSalt = None
    ttft_ms: float | None = Field(None, description="SLO on the time to the first token")
    tpot_ms: float | None = Field(None, description="SLO on the time per output token")
    slo_class: str | None = Field(None, description="SLO class, of those that the operator has set")
    priority: Priority = None
    request_id: RequestId = None
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


Stop = Annotated[
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


class OpenAIFields(Generating):
    """Fields of OpenAI's requests that generate."""

    stop: Stop = None
    user: Annotated[Any, ANYBODY] = None
    safety_identifier: Annotated[Any, ANYBODY] = None
    prompt_cache_key: Annotated[Any, CACHED] = None
    prompt_cache_options: Annotated[Any, CACHED] = None
    prompt_cache_retention: Annotated[Any, CACHED] = None
    session_id: Annotated[Any, CACHED] = None


class CompletionFields(OpenAIFields):
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
    metadata: Annotated[Any, FOR_CLIENTS] = None
    store: Annotated[Any, Ignored("no output is stored")] = None
    length_penalty: Annotated[Any, _NO_BEAMS] = None
    early_stopping: Annotated[Any, _NO_BEAMS] = None
    spaces_between_special_tokens: Annotated[Any, _NO_SPACES] = None
    stream_interval: Annotated[Any, _NO_INTERVAL] = None
    guided_decoding_backend: Annotated[Any, ONE_CLASS] = None
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
Stream = Annotated[bool | None, Field(description="the output comes as events; default false")]
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
    stream: Stream = None
    stream_options: _NewestUsage = None
    add_special_tokens: Annotated[Any, Refused(_SPECIAL_TOKENS, True)] = None


class EmbeddingsRequest(RequestModel):
    """A call of /v1/embeddings."""

    model: ModelName = None
    input: Annotated[Prompts, _limit_prompts(MAX_INPUTS)] = Field(description="text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="default float")
    dimensions: int | None = Field(
        None, ge=0, le=2**31 - 1, description="of a model whose config.json has is_matryoshka or matryoshka_dimensions"
    )
    normalize: bool | None = Field(None, description="to length 1; default: as the model's folder says")
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="the first tokens are kept; -1: as many as there is room for"
    )
    cache_salt: CacheSalt = None
    priority: Priority = None
    request_id: RequestId = None
    user: Annotated[Any, ANYBODY] = None
    safety_identifier: Annotated[Any, ANYBODY] = None
    additional_data: Annotated[Any, FOR_CLIENTS] = None
    service_tier: Annotated[Any, ONE_CLASS] = None
    media_io_kwargs: Annotated[Any, TEXT_ONLY] = None
    mm_processor_kwargs: Annotated[Any, TEXT_ONLY] = None
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
    chat_template_kwargs: TemplateVariables = None
    media_io_kwargs: Annotated[Any, TEXT_ONLY] = None
    mm_processor_kwargs: Annotated[Any, TEXT_ONLY] = None
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
    include_reasoning: IncludeReasoning = None
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
    stream: Stream = None
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

    model: ModelName = None
    prompt: str | None = Field(None, description="a text, in place of messages")
    messages: Conversation | None = Field(None, description="a conversation, in place of a prompt")
    tools: Tools | None = Field(None, description="functions that the chat template shows")
    add_special_tokens: bool | None = Field(None, description="of a prompt; true is refused for messages; default true")
    return_token_strs: bool | None = Field(None, description="default false")


class DetokenizeRequest(RequestModel):
    """A call of /detokenize."""

    model: ModelName = None
    tokens: TokenIds


# ---- Token ids in and out: vLLM's /inference/v1/generate ----


class TokensSampling(SamplingFields):
    """Sampling fields of /inference/v1/generate."""

    n: _Count = None
    max_tokens: Int32 | None = Field(None, description="default: what the prompt leaves room for")
    stop: Stop = None
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
    stream: Stream = None
    stream_options: _NewestUsage = None
    prompt_text: Annotated[Any, Ignored("token_ids are the prompt")] = None
    reasoning_parser_kwargs: Annotated[Any, Ignored("token_ids show whether the output begins with thoughts")] = None
    token_offsets: Annotated[Any, Ignored("token_ids are the prompt")] = None
    content_parts: Annotated[Any, Refused("the prompt is token ids", [])] = None
    features: Annotated[Any, Refused("the prompt is token ids", {})] = None


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
