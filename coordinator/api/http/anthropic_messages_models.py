"""Declare the requests of Anthropic's Messages API, as coordinator/api/http/request_models.py declares the others."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, Tag, ValidationInfo, field_validator

from coordinator.api.http.field_types import LIST, TEXT, Ignored, Model, Refused, by_json_type, expected
from coordinator.api.http.request_models import (
    ANYBODY,
    CACHED,
    FOR_CLIENTS,
    MAX_TOOLS,
    NOT_READ,
    ONE_CLASS,
    STATELESS,
    ContentPart,
    Effort,
    FunctionName,
    Generating,
    IncludeReasoning,
    RedactedThinkingPart,
    Stop,
    Stream,
    TemplateVariables,
    ThinkingPart,
    check_parameters,
)
from coordinator.api.validation import MAX_MESSAGES, MAX_PARTS

_CLEARS_NOTHING: Final = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class AnthropicText(ContentPart):
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
    cache_control: Annotated[Any, CACHED] = None


Block = Annotated[AnthropicText | Document, Field(discriminator="type")]
Blocks = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Block], Field(max_length=MAX_PARTS), Tag(LIST)], _TEXT_OR_BLOCKS
]


class ToolResult(Model):
    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: Blocks | None = None
    is_error: bool | None = None
    cache_control: Annotated[Any, CACHED] = None


class ToolUse(Model):
    type: Literal["tool_use"]
    id: str | None = None
    name: FunctionName
    input: dict[str, Any]
    cache_control: Annotated[Any, CACHED] = None
    caller: Annotated[Any, NOT_READ] = None


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
    input_schema: Annotated[dict[str, Any] | None, AfterValidator(check_parameters)] = None
    cache_control: Annotated[Any, CACHED] = None
    eager_input_streaming: Annotated[Any, Ignored("the input of a tool comes as it is generated")] = None
    input_examples: Annotated[Any, NOT_READ] = None


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
    stop_sequences: Stop = None
    stream: Stream = None
    tools: list[AnthropicTool] | None = Field(
        None, max_length=MAX_TOOLS, description="functions that the output may call"
    )
    tool_choice: AnthropicToolChoice | None = Field(None, description="default auto")
    thinking: Thinking | None = Field(None, description="enable_thinking of the chat template")
    output_config: OutputConfig | None = Field(None, description="effort and format of the output")
    chat_template_kwargs: TemplateVariables = None
    include_reasoning: IncludeReasoning = None
    cache_control: Annotated[Any, CACHED] = None
    diagnostics: Annotated[Any, Ignored("the response has all there is")] = None
    metadata: Annotated[Any, FOR_CLIENTS] = None
    billing_policy: Annotated[Any, Ignored("nothing is billed")] = None
    fallback_credit_token: Annotated[Any, Ignored("nothing is billed")] = None
    fallbacks: Annotated[Any, Ignored("the model answers each request, or an error does")] = None
    speed: Annotated[Any, ONE_CLASS] = None
    user_profile_id: Annotated[Any, ANYBODY] = None
    workspace_id: Annotated[Any, ANYBODY] = None
    container: Annotated[Any, Refused("tools are the client's own", [])] = None
    mcp_servers: Annotated[Any, Refused("tools are the client's own", [])] = None
    inference_geo: Annotated[Any, Refused("the server does not know its place")] = None
    thread: Annotated[Any, Refused(STATELESS)] = None
    compaction: Annotated[Any, Refused("the server summarizes nothing")] = None
    context_management: Annotated[
        Any, Refused("send what the model is to read", {}, {"edits": []}, _CLEARS_NOTHING)
    ] = None
    output_format: Annotated[Any, Refused("it is format of output_config")] = None
