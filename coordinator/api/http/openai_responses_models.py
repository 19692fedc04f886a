"""Declare the requests of OpenAI's Responses API, as coordinator/api/http/request_models.py declares the others."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, Tag, ValidationInfo, field_validator

from coordinator.api.http.field_types import (
    LIST,
    OBJECT,
    TEXT,
    Ignored,
    Model,
    Refused,
    Texts,
    by_json_type,
    expected,
    fault,
    shown,
)
from coordinator.api.http.request_models import (
    MAX_TOOLS,
    NOT_READ,
    STATELESS,
    TEXT_ONLY,
    Arguments,
    Content,
    ContentPart,
    Effort,
    Function,
    FunctionName,
    IncludeReasoning,
    NamedFunction,
    OpenAIFields,
    Stream,
    TemplateVariables,
)
from coordinator.api.validation import MAX_MESSAGES, MAX_PARTS

MAX_INCLUDED: Final = 32
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


class _Item(Model):
    id: Annotated[Any, NOT_READ] = None
    status: Annotated[Any, NOT_READ] = None
    phase: Annotated[Any, NOT_READ] = None
    summary: Annotated[Any, NOT_READ] = None
    encrypted_content: Annotated[Any, NOT_READ] = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    namespace: Annotated[Any, NOT_READ] = None
    call_id: str | None = None
    name: FunctionName
    arguments: Arguments | None = None


class FunctionOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content


class ReasoningText(ContentPart):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(None, max_length=MAX_PARTS)


def with_type(value: Any) -> Any:
    return value if not isinstance(value, dict) or value.get("type") else {**value, "type": "message"}


Item = Annotated[
    Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(with_type),
]


class TextFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Any, NOT_READ] = None
    description: Annotated[Any, NOT_READ] = None
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


class ResponsesRequest(OpenAIFields):
    """A call of /v1/responses."""

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[Item], Field(max_length=MAX_MESSAGES), Tag(LIST)],
        by_json_type("a string, or a list of items"),
    ]
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="default: what the prompt leaves room for"
    )
    stream: Stream = None
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
    chat_template_kwargs: TemplateVariables = None
    include_reasoning: IncludeReasoning = None
    metadata: dict[str, Any] | None = Field(None, description="the response repeats it")
    access_programs: Annotated[Any, Ignored("there are none")] = None
    image: Annotated[Any, TEXT_ONLY] = None
    max_tool_calls: Annotated[Any, Ignored("it is of built-in tools")] = None
    media_io_kwargs: Annotated[Any, TEXT_ONLY] = None
    mm_processor_kwargs: Annotated[Any, TEXT_ONLY] = None
    stream_options: Annotated[Any, Ignored("events have no padding")] = None
    background: Annotated[Any, Refused("a response comes while its client waits", False)] = None
    background_options: Annotated[Any, Refused("a response comes while its client waits")] = None
    context_management: Annotated[Any, Refused("send what the model is to read", [])] = None
    conversation: Annotated[Any, Refused(STATELESS)] = None
    enable_response_messages: Annotated[Any, Refused("the response has output, and no messages", False)] = None
    moderation: Annotated[Any, Refused("nothing is moderated")] = None
    previous_input_messages: Annotated[Any, Refused("send them in input", [])] = None
    previous_response: Annotated[Any, Refused("send its output in input")] = None
    previous_response_id: Annotated[Any, Refused(STATELESS)] = None
    prompt: Annotated[Any, Refused("no prompts are stored")] = None
    store: Annotated[Any, Refused("no output is stored", False)] = None
    truncation: Annotated[Any, Refused("send what there is room for", "disabled")] = None

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        for unknown in set(value or ()).difference(INCLUDABLE):
            raise fault(f"({shown(unknown)}) is not supported: it may name {', '.join(INCLUDABLE)}")
        return value
