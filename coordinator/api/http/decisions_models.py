"""Declare the requests whose responses are probabilities of replies, without text: decisions, scores and rankings.

The rules are those of coordinator/api/http/request_models.py.
"""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, Tag, field_validator

from coordinator.api.http.field_types import LIST, TEXT, Ignored, Model, Refused, RequestModel, by_json_type, fault
from coordinator.api.http.openai_responses_models import FunctionCallItem, FunctionOutputItem, MessageItem, with_type
from coordinator.api.http.request_models import (
    ANYBODY,
    CACHED,
    CONTENT,
    TEXT_ONLY,
    CacheSalt,
    ModelName,
    Priority,
    RequestId,
    TemplateVariables,
    TextPart,
)
from coordinator.api.scoring import MAX_ITEMS, MAX_LABELS
from coordinator.api.validation import MAX_MESSAGES, MAX_PARTS

MAX_LEVELS: Final = 10
MAX_QUESTIONS: Final = 400  # OpenAI's


class Scoring(RequestModel):
    """Fields of the requests that are answered with probabilities of replies."""

    model: ModelName = None
    cache_salt: CacheSalt = None
    ttft_ms: float | None = Field(None, description="SLO on the time to the response")
    slo_class: str | None = Field(None, description="SLO class, of those that the operator has set")
    priority: Priority = None
    request_id: RequestId = None
    user: Annotated[Any, ANYBODY] = None
    safety_identifier: Annotated[Any, ANYBODY] = None


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
    value = with_type(value)
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
    CONTENT,
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
    prompt_cache_key: Annotated[Any, CACHED] = None
    prompt_cache_options: Annotated[Any, CACHED] = None


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
    chat_template_kwargs: TemplateVariables = None
    decision_template: Annotated[Any, Refused("templates are the operator's (--chat-template)")] = None
    seed: Annotated[Any, Ignored("nothing is drawn")] = None


class _Ranking(Scoring):
    """Fields of scores and rankings."""

    instruction: str | None = Field(None, description="what makes a document relevant, for the model")
    chat_template_kwargs: TemplateVariables = None
    mm_processor_kwargs: Annotated[Any, TEXT_ONLY] = None
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
