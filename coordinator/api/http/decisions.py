"""Convert calls of /v1/decisions and /v1/systemone to Score requests, and their results to responses. Performs no I/O.

A question is the end of a user's message, and its options have labels: the probabilities of an answer are those of the
labels as the model's reply, which is not generated.
"""

import json
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from coordinator.api.http.api_adapters import ChatBody, Object
from coordinator.api.http.decisions_models import (
    ChoiceQuestion,
    DecisionsRequest,
    Noul,
    Predicate,
    Question,
    Scoring,
    SystemOneChoice,
    SystemOneQuestion,
    SystemOneRequest,
    json_text,
)
from coordinator.api.http.openai_responses import add_item
from coordinator.api.http.request_models import ChatRequest
from coordinator.api.http.requests import chat_input, text_of
from coordinator.api.validation import bad
from protos.inference_pb2 import ChatInput, ChatMessage, ScoreItem, ScoreRequest, ScoreResponse

YES, NO = "yes", "no"
NO_THOUGHTS: Final = {"enable_thinking": False}  # the reply begins with a label
USER: Final = "user"


class Option(NamedTuple):
    """A label, and what it stands for."""

    label: str
    name: str = ""
    about: str = ""

    @property
    def line(self) -> str:
        named = f"{self.label}. {self.name}" if self.name else self.label
        return f"{named}: {self.about}" if self.about else named


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its options, and what a reply has to be."""

    instructions: str
    options: Sequence[Option]
    reply: str

    @property
    def item(self) -> ScoreItem:
        lines = [self.instructions, "", *(each.line for each in self.options), "", f"Answer with {self.reply} alone."]
        return ScoreItem(text="\n".join(lines), labels=[each.label for each in self.options])


def yes_or_no(instructions: str, yes: str = "", no: str = "") -> Asked:
    return Asked(instructions, [Option(YES, about=yes), Option(NO, about=no)], f"{YES} or {NO}")


def choice_of(instructions: str, options: Sequence[tuple[str, str]]) -> Asked:
    """Return a choice with letters as labels; with numbers of equal length where there are not enough letters."""
    letters, num = string.ascii_uppercase, len(options)
    labels = letters if num <= len(letters) else [f"{index:0{len(str(num))}}" for index in range(1, num + 1)]
    what = "the letter" if num <= len(letters) else "the number"
    return Asked(instructions, _labeled(labels, options), f"{what} of the option that fits best")


def score_of(instructions: str, levels: Sequence[tuple[str, str]]) -> Asked:
    return Asked(instructions, _labeled(string.digits, levels), "the number of the level that fits best")


def _labeled(labels: Iterable[str], options: Sequence[tuple[str, str]]) -> list[Option]:
    return [Option(label, name, about) for label, (name, about) in zip(labels, options, strict=False)]


@dataclass(frozen=True, slots=True)
class Odds:
    """Probabilities of the options of a question, which sum to 1, and of all labels together as a reply."""

    probabilities: Sequence[float]
    mass: float

    @property
    def best(self) -> int:
        """Return the index of the likeliest option; of equal ones, the first."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """Return the probability of the likeliest option's label as a reply."""
        return self.probabilities[self.best] * self.mass

    @property
    def expected(self) -> float:
        return sum(index * each for index, each in enumerate(self.probabilities))


def odds_of(logprobs: Sequence[float]) -> Odds | None:
    """Return the odds for the logprobs of labels; None where no label can come."""
    highest = max(logprobs)
    if highest == -math.inf:
        return None
    weights = [math.exp(each - highest) for each in logprobs]
    total = sum(weights)
    return Odds([each / total for each in weights], min(1.0, total * math.exp(highest)))


def chat_of(template_kwargs: Mapping[str, Any] | None, messages: Sequence[ChatMessage]) -> ChatInput:
    """Return the conversation without thoughts, unless the variables of the template ask for some."""
    kwargs = {**NO_THOUGHTS, **(template_kwargs or {})}
    return ChatInput(messages=messages, template_kwargs_json=text_of_json("chat_template_kwargs", kwargs))


def score_request(request: Scoring, request_id: str, chat: ChatInput, items: Sequence[ScoreItem]) -> ScoreRequest:
    return ScoreRequest(
        request_id=request_id, model=request.model or "", cache_salt=request.cache_salt or "", chat=chat, items=items
    )


def text_of_json(name: str, value: Any) -> str:
    """Return a text as it is, null as an empty text, and any other value as JSON. Raises RequestError."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json_text(value)
    except ValueError as error:
        raise bad(name, str(error)) from error


# ---- /v1/decisions ----

DECISION_NAMES: Final = {"items": "questions", "chat": "input", "messages": "input"}
"""Fields of /v1/decisions by those of a Score request and of a chat, for errors."""


def parse_decisions(request: DecisionsRequest, request_id: str) -> list[ScoreRequest]:
    """Return the Score request of a call. Raises RequestError."""
    chat = _chat_of_items(request)
    return [score_request(request, request_id, chat, [_asked(each).item for each in request.questions])]


def _chat_of_items(request: DecisionsRequest) -> ChatInput:
    body = ChatBody(request)
    body.values = {"messages": body.messages, "chat_template_kwargs": NO_THOUGHTS}
    if isinstance(request.input, str):
        body.add_message(USER, content=request.input)
    else:
        for item in request.input:
            add_item(item, body)
    if not body.messages or body.messages[-1]["role"] != USER:
        body.add_message(USER, content="")
    chat = ChatRequest.read(body.values)
    return _before_question(chat_input(chat, chat.messages, has_tools=False))


def _before_question(chat: ChatInput) -> ChatInput:
    """Return the conversation with an empty line between its last message and what is appended to it."""
    last = chat.messages[-1]
    if text := last.content or "\n".join(last.content_parts):
        last.content = f"{text}\n\n"
        del last.content_parts[:]
    return chat


def _asked(question: Question) -> Asked:
    text = question.instructions
    text = text if isinstance(text, str) else "\n".join(map(text_of, text))
    if isinstance(question, Predicate):
        return yes_or_no(text)
    if isinstance(question, ChoiceQuestion):
        return choice_of(text, [(_shown(each.value), each.description or "") for each in question.choices])
    return score_of(text, [(each.label, each.description or "") for each in question.levels])


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def decisions_body(request: DecisionsRequest, responses: Sequence[ScoreResponse], model: str) -> Object:
    """Return the response of /v1/decisions."""
    [response] = responses
    results = zip(request.questions, response.items, strict=True)
    answers = [_answer(question, odds_of(item.logprobs)) for question, item in results]
    usage = {
        "input_tokens": response.prompt_tokens,
        "input_tokens_details": {"cached_tokens": response.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": response.prompt_tokens,
    }
    return {"model": model, "answers": answers, "usage": usage}


def _answer(question: Question, odds: Odds | None) -> Object:
    known = {"type": question.type, "name": question.name}
    if odds is None:
        return {**known, "type": "refusal"}
    if isinstance(question, Predicate):
        return {**known, "probability": odds.probabilities[0]}
    if isinstance(question, ChoiceQuestion):
        values = [each.value for each in question.choices]
        pairs = [{"value": v, "probability": p} for v, p in zip(values, odds.probabilities, strict=True)]
        return {**known, "choice": values[odds.best], "probabilities": pairs, "confidence": odds.confidence}
    levels = [
        {"value": index, "label": level.label, "probability": p}
        for index, (level, p) in enumerate(zip(question.levels, odds.probabilities, strict=True))
    ]
    return {**known, "score": odds.expected, "probabilities": levels, "confidence": odds.confidence}


# ---- /v1/systemone ----

SYSTEMONE_NAMES: Final = {
    "items": "questions",
    "chat": "state",
    "chat.template_kwargs_json": "chat_template_kwargs",
}


def parse_systemone(request: SystemOneRequest, request_id: str) -> list[ScoreRequest]:
    """Return the Score request of a call. Raises RequestError."""
    before = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    state = ChatMessage(role=USER, content=text_of_json("state", request.state))
    chat = _before_question(chat_of(request.chat_template_kwargs, [*before, state]))
    items = [_asked_of(each, f"questions.{name}").item for name, each in request.questions.items()]
    return [score_request(request, request_id, chat, items)]


def _asked_of(question: SystemOneQuestion, name: str) -> Asked:
    text = text_of_json(f"{name}.instructions", question.instructions)
    told = f"{name}.criteria"
    if isinstance(question, Noul):
        sides = question.criteria or {}
        return yes_or_no(text, *(text_of_json(told, sides.get(side)) for side in ("true", "false")))
    if isinstance(question, SystemOneChoice):
        return choice_of(text, [(each, text_of_json(told, about)) for each, about in question.criteria.items()])
    return score_of(text, [(text_of_json(told, each), "") for each in question.criteria])


def systemone_body(request: SystemOneRequest, responses: Sequence[ScoreResponse], model: str) -> Object:
    """Return the response of /v1/systemone, without the questions of which no label can come."""
    [response] = responses
    answers = {
        name: _answer_of(question, odds)
        for (name, question), item in zip(request.questions.items(), response.items, strict=True)
        if (odds := odds_of(item.logprobs)) is not None
    }
    return {"model": model, "answers": answers, "usage": {"input_tokens": response.prompt_tokens, "output_tokens": 0}}


def _answer_of(question: SystemOneQuestion, odds: Odds) -> Object:
    if isinstance(question, Noul):
        return {"type": "noul", "noul": odds.probabilities[0]}
    if isinstance(question, SystemOneChoice):
        names = list(question.criteria)
        probabilities = dict(zip(names, odds.probabilities, strict=True))
        chosen = {"choice": names[odds.best], "probabilities": probabilities, "confidence": odds.confidence}
        return {"type": "choice", **chosen}
    return {
        "type": "score",
        "score": odds.expected,
        "legend": {str(index): text_of_json("criteria", each) for index, each in enumerate(question.criteria)},
        "probabilities": {str(index): each for index, each in enumerate(odds.probabilities)},
        "confidence": odds.confidence,
    }
