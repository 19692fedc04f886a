"""Convert the requests of OpenAI's endpoints to GenerateRequest messages. Performs no I/O.

The models (models.py) have checked fields one by one; here those that depend on each other are checked. Values that
depend on the model or the fleet are checked where the gRPC API checks them.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from coordinator.api.http.decisions_models import Scoring
from coordinator.api.http.request_models import (
    AssistantMessage,
    BatchRequest,
    ChatFields,
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    EmbeddingsRequest,
    Message,
    Part,
    Prompts,
    RefusalPart,
    ResponseFormat,
    Scheduled,
    StructuredOutputs,
    TemplateFields,
    TextPart,
    ThinkingPart,
    TokenizeRequest,
    TokensSampling,
    ToolCall,
)
from coordinator.api.http.tools import Offer, functions_of, object_of, offer_of
from coordinator.api.prompts import USUAL, WHAT_FITS, Terms
from coordinator.api.validation import (
    MAX_CONSTRAINT_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TEMPLATE_KWARGS_CHARS,
    WHOLE_VOCABULARY,
    bad,
)
from coordinator.control.slo import MAX_PRIORITY
from coordinator.text.answer_format import NONE, PLAIN, AnswerFormat
from coordinator.text.constraints import Leeway
from protos.inference_pb2 import (
    ChatInput,
    ChatMessage,
    Choice,
    EmbedRequest,
    GenerateRequest,
    SamplingParams,
    ScoreRequest,
    TokenizedInput,
)
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

MAX_COPIED_BYTES: Final = 2**27
MAX_SCORED_PROMPTS: Final = 16  # each has up to validation.MAX_PROMPT_LOGPROBS logprobs
DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's

# Field names of an endpoint, by their gRPC names.
COMPLETION_NAMES: Final = {"text": "prompt", "tokenized.input_ids": "prompt", "input": "prompt"}
CHAT_NAMES: Final = {
    "chat": "messages",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.continue_final_message": "continue_final_message",
    "chat.messages": "messages",
    "chat.template_kwargs_json": "chat_template_kwargs",
    "chat.tools_json": "tools",
    "input": "messages",
    "logprobs": "top_logprobs",
}

Prompt = str | TokenizedInput | ChatInput
"""Input of one sequence, or of each of n."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One call of an endpoint.

    `requests` has one request for each prompt, each with `num_sequences` sequences. `names` maps gRPC field names to
    the names that the client has sent.
    """

    requests: tuple[GenerateRequest, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    num_sequences: int = 1
    stream: bool = False
    include_usage: bool = False  # in a last event of a stream
    continuous_usage: bool = False  # in every event of a stream
    return_token_ids: bool = False
    include_timeline: bool = False
    echoes: bool = False  # outputs begin with the prompt and its logprobs, or with the assistant's message
    is_scored: bool = False  # prompt logprobs have a field of their own
    tokens_as_ids: bool = False  # in logprobs
    scores_content: bool = False  # logprobs cover the content without thoughts and tool calls
    includes_thoughts: bool = True
    offer: Offer | None = None  # tools that the output may call
    terms: Terms = USUAL
    service_tier: str | None = None  # of the response; None if none was asked for
    output_mode: str = ""  # of a call with token ids (coordinator/api/http/tokens.py)


def parse_completion(request: CompletionRequest, request_id: str) -> ParsedRequest:
    """Convert a call of /v1/completions. Raises RequestError."""
    params = sampling_params(request, request.response_format)
    max_tokens, echoes = request.max_tokens, request.echo or False
    if max_tokens is None and request.truncate_prompt_tokens == WHAT_FITS:
        max_tokens = DEFAULT_COMPLETION_TOKENS  # truncation leaves room for as many
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if request.logprobs is not None:
        params.logprobs = request.logprobs
        if echoes:
            params.prompt_logprobs = _more(request.logprobs, params.prompt_logprobs)
    prompts: list[Prompt] = [
        each if isinstance(each, str) else TokenizedInput(input_ids=each) for each in prompts_of(request.prompt)
    ]
    if params.HasField("prompt_logprobs") and len(prompts) > MAX_SCORED_PROMPTS:
        problem = f"has {len(prompts)} prompts; with their logprobs the limit is {MAX_SCORED_PROMPTS}"
        raise bad("prompt", problem)
    parsed = _parsed(request, _requests(request, params, request_id, prompts))
    drops_answers = echoes and max_tokens == 0
    terms = replace(parsed.terms, default_max_tokens=DEFAULT_COMPLETION_TOKENS, drops_answers=drops_answers)
    names = {**COMPLETION_NAMES, **parsed.names}
    if echoes and request.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    return replace(parsed, names=names, echoes=echoes, terms=terms)


def _more(num: int, other: int) -> int:
    return WHOLE_VOCABULARY if WHOLE_VOCABULARY in (num, other) else max(num, other)


def parse_chat(request: ChatRequest, request_id: str, answer_format: AnswerFormat = PLAIN) -> ParsedRequest:
    """Convert a call of /v1/chat/completions. Raises RequestError."""
    params, offer = _chat_params(request, answer_format)
    chat = chat_input(request, request.messages, has_tools=offer is not None)
    return _parsed_chats(request, _requests(request, params, request_id, [chat]), answer_format, offer)


def parse_batch(request: BatchRequest, request_id: str, answer_format: AnswerFormat = PLAIN) -> ParsedRequest:
    """Convert a call of /v1/chat/completions/batch, which has no tools. Raises RequestError.

    `answer_format` is that of the served model.
    """
    params, offer = _chat_params(request, answer_format)
    chats = [chat_input(request, messages, has_tools=False) for messages in request.messages]
    return _parsed_chats(request, _requests(request, params, request_id, chats), answer_format, offer)


def _chat_params(request: ChatFields, answer_format: AnswerFormat) -> tuple[SamplingParams, Offer | None]:
    params = sampling_params(request, request.response_format)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if request.logprobs:
        params.logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise bad("top_logprobs", "needs logprobs: true")
    offer = offer_of(request, answer_format)
    if offer is None:
        return params, offer
    if offer.schema:
        if request.structured_outputs is not None:
            raise bad("tool_choice", "cannot be had beside structured_outputs: one of them says what comes")
        params.json_schema = offer.schema  # response_format applies to an output without tool calls
    elif (
        params.WhichOneof("constraint") and (num := sum(len(schema) for _, schema in offer.held)) > MAX_CONSTRAINT_CHARS
    ):
        problem = (
            f"have strict schemas of {num} characters, beside a response format the limit is {MAX_CONSTRAINT_CHARS}"
        )
        raise bad("tools", problem)
    return params, offer


def _requests(
    request: CompletionFields, params: SamplingParams, request_id: str, prompts: Sequence[Prompt]
) -> list[GenerateRequest]:
    """Return one request for each prompt. Raises RequestError when the copies of the other fields need too much
    memory."""
    if (num_bytes := len(prompts) * params.ByteSize()) > MAX_COPIED_BYTES:
        problem = f"the {len(prompts)} prompts' sampling fields have {num_bytes} bytes, the limit is {MAX_COPIED_BYTES}"
        raise RequestError(BAD_PARAM, problem)
    ids = ids_of(request_id, len(prompts))
    return [_request(request, params, each_id, prompt) for each_id, prompt in zip(ids, prompts, strict=True)]


def _request(request: CompletionFields, params: SamplingParams, request_id: str, prompt: Prompt) -> GenerateRequest:
    message = GenerateRequest(
        request_id=request_id,
        model=request.model or "",
        cache_salt=request.cache_salt or "",
        sampling_params=params,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
    match prompt:
        case str():
            message.text = prompt
        case TokenizedInput():
            message.tokenized.CopyFrom(prompt)
        case ChatInput():
            message.chat.CopyFrom(prompt)
    return message


def _parsed(request: CompletionFields, requests: list[GenerateRequest]) -> ParsedRequest:
    stream, is_scored = request.stream or False, request.prompt_logprobs is not None
    if stream and is_scored:
        raise bad("prompt_logprobs", "is not supported in a stream")
    options = request.stream_options
    if options is not None and not stream:
        raise bad("stream_options", "needs stream: true")
    includes_usage = bool(options and options.include_usage)
    return ParsedRequest(
        requests=tuple(requests),
        names=_constraint_names(request),
        terms=Terms(keeps_first=request.truncation_side == "right"),
        num_sequences=request.n or 1,
        stream=stream,
        include_usage=includes_usage,
        continuous_usage=includes_usage and bool(options.continuous_usage_stats),
        return_token_ids=request.return_token_ids or False,
        include_timeline=request.include_timeline or False,
        is_scored=is_scored,
        tokens_as_ids=request.return_tokens_as_token_ids or False,
    )


def _parsed_chats(
    request: ChatFields, requests: list[GenerateRequest], answer_format: AnswerFormat, offer: Offer | None
) -> ParsedRequest:
    loose = offer.loose if offer is not None else ()
    leeway = Leeway(answer_format.thinks, answer_format.reasoning, answer_format.calls, loose=loose)
    if offer is not None and offer.held:
        leeway = replace(leeway, tools=offer.held, most_calls=offer.most_calls, must_call=offer.must_call)
    elif offer is not None:  # calls in JSON, without the markup of the model's own format
        leeway = replace(leeway, calls=NONE)
    parsed = _parsed(request, requests)
    names = {**CHAT_NAMES, **parsed.names}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return replace(
        parsed,
        names=names,
        echoes=request.echo or False,
        offer=offer,
        terms=replace(parsed.terms, leeway=leeway),
        includes_thoughts=request.include_reasoning is not False,
    )


_SAME: Final = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("n", "seed", "min_tokens", "prompt_logprobs", "skip_special_tokens", "ignore_eos", "include_stop_str_in_output"),
    *("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids"),
)


def sampling_params(fields: CompletionFields | TokensSampling, form: ResponseFormat | None = None) -> SamplingParams:
    """Return the sampling parameters that completions, chat completions and calls with token ids have."""
    return SamplingParams(
        **{name: getattr(fields, name) for name in _SAME},
        logit_bias={int(token): bias or 0.0 for token, bias in (fields.logit_bias or {}).items()},
        **_constraint(form, fields.structured_outputs),
    )


def prompts_of(value: Prompts) -> Sequence[str | list[int]]:
    """Return the prompts of a string, token ids, or a list of either."""
    if isinstance(value, list) and not isinstance(value[0], int):
        return value
    return [value]


# ---- Ids of the requests of one call ----


def ids_of(request_id: str, count: int) -> list[str]:
    """Return the ids: the call's own for one request, else with a numeric suffix.

    Raises RequestError when the suffix makes the id too long.
    """
    if count == 1:
        return [request_id]
    ids = [f"{request_id}-{index}" for index in range(count)]
    limit = MAX_REQUEST_ID_CHARS - len(ids[-1]) + len(request_id)
    if limit < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise bad("request_id", f"has {len(request_id)} characters, the limit for {count} requests is {limit}")
    return ids


# ---- Structured output: OpenAI's response_format and vLLM's structured_outputs ----

KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")  # of structured_outputs


def _constraint(form: ResponseFormat | None, outputs: StructuredOutputs | None) -> dict[str, Any]:
    """Return the constraint fields of SamplingParams. Raises RequestError."""
    found = {} if form is None else _of_format(form)
    if outputs is None:
        return found
    if found:
        raise bad("structured_outputs", "cannot be had beside response_format: one of them says what comes")
    return _of_outputs(outputs)


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_schema" and form.json_schema is not None:
        return {"json_schema": _schema("response_format.json_schema.schema", form.json_schema.json_schema)}
    if form.type == "json_object" and form.object_schema is not None:
        return {"json_schema": _schema("response_format.schema", form.object_schema)}
    return {"json_object": True} if form.type == "json_object" else {}


def _of_outputs(outputs: StructuredOutputs) -> dict[str, Any]:
    kinds: dict[str, Any] = {
        "json": outputs.json_value,
        "json_object": outputs.json_object or None,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
    }
    given = {kind: value for kind, value in kinds.items() if value is not None}
    if len(given) != 1:
        raise bad("structured_outputs", f"must have one of {', '.join(kinds)}, not {len(given)}")
    if "json" in given:
        schema = given.pop("json")
        given["json_schema"] = schema if isinstance(schema, str) else _schema("structured_outputs.json", schema)
    elif "choice" in given:
        given["choice"] = Choice(choices=outputs.choice)
    names = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
    return {**given, **{name: getattr(outputs, name) for name in names}}


OUTPUTS_NAMES: Final = {"json_schema": "structured_outputs.json"} | {
    name: f"structured_outputs.{name}" for name in (*KINDS, "whitespace_pattern")
}
"""Fields of structured_outputs, by the constraint fields of SamplingParams."""


def _constraint_names(request: CompletionFields) -> Mapping[str, str]:
    """Map the constraint fields of SamplingParams to the client's field names."""
    if request.structured_outputs is not None:
        return OUTPUTS_NAMES
    match request.response_format:
        case ResponseFormat(type="json_schema"):
            return {"json_schema": "response_format.json_schema.schema"}
        case ResponseFormat(type="json_object"):
            return {"json_schema": "response_format.schema", "json_object": "response_format"}
    return {}


def _schema(name: str, schema: Any) -> str:
    """Return a schema as text; its validity is checked when it is compiled."""
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise bad(name, "is nested too deeply") from error


# ---- Conversations, as chat templates take them ----


def chat_input(request: TemplateFields, messages: Sequence[Message], *, has_tools: bool) -> ChatInput:
    """Return the template input for a conversation, with or without the request's tools. Raises RequestError."""
    return ChatInput(
        messages=[_message(index, message) for index, message in enumerate(messages)],
        tools_json=_as_json("tools", request.given("tools")) if has_tools else "",
        template_kwargs_json=_template_kwargs_json(request),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message or False,
    )


def _template_kwargs_json(request: TemplateFields) -> str:
    """Return the template variables of a request; reasoning_effort sets the variables that templates know."""
    kwargs, effort = request.chat_template_kwargs or {}, request.reasoning_effort
    if effort is not None:
        kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}
    text = _as_json("chat_template_kwargs", kwargs)
    if len(text) > MAX_TEMPLATE_KWARGS_CHARS:  # before it is copied
        raise bad("chat_template_kwargs", f"has {len(text)} characters, the limit is {MAX_TEMPLATE_KWARGS_CHARS}")
    return text


def _message(index: int, message: Message) -> ChatMessage:
    content = message.content
    parts = content if isinstance(content, list) else []
    texts = [text_of(part) for part in parts if isinstance(part, TextPart | RefusalPart)]
    thoughts = "\n".join(part.thinking for part in parts if isinstance(part, ThinkingPart))
    extra_json = _extra_json(index, message, thoughts)
    if isinstance(message, AssistantMessage) and not texts:
        texts = [message.refusal or ""]
    if isinstance(content, list):
        return ChatMessage(role=message.role, content_parts=texts, extra_json=extra_json)
    return ChatMessage(role=message.role, content=content or "".join(texts), extra_json=extra_json)


def text_of(part: Part) -> str:
    """Return the text of a part. A refusal counts as text."""
    return part.refusal if isinstance(part, RefusalPart) else part.text


def _extra_json(index: int, message: Message, thoughts: str) -> str:
    """Return the fields of a message besides role and content, as JSON."""
    given = {
        "name": message.name,
        "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
        "tool_call_id": message.tool_call_id,
    }
    extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if thoughts:
        extra.setdefault("reasoning_content", thoughts)
    if message.tool_calls:
        extra["tool_calls"] = [_call(call) for call in message.tool_calls]
    return _as_json(f"messages[{index}].tool_calls", extra)


def _call(call: ToolCall) -> dict[str, Any]:
    """Return an earlier tool call, with its arguments as an object, as templates expect."""
    given, known = call.function.arguments, {} if call.id is None else {"id": call.id}
    arguments = given if isinstance(given, dict) else object_of(given or "")
    return {**known, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _as_json(name: str, value: Any) -> str:
    """Return a value of a field as JSON text; empty for a falsy value."""
    try:
        text = json.dumps(value, ensure_ascii=False) if value else ""
        text.encode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise bad(name, "is nested too deeply, or has strings that are no valid Unicode") from error
    return text


# ---- /tokenize and /v1/embeddings ----


def parse_tokenize(request: TokenizeRequest) -> ChatInput | str:
    """Return what is to be tokenized: a conversation or a prompt. Raises RequestError."""
    if request.messages is None:
        for name in (*_OF_CHATS, "tools"):
            if getattr(request, name):
                raise bad(name, "needs messages: a prompt has no chat template")
        if request.prompt is None:
            raise bad("prompt", "is missing: send it, or messages")
        return request.prompt
    if request.prompt is not None:
        raise bad("prompt", "cannot be had beside messages: send one of them")
    if request.add_special_tokens:
        raise bad("add_special_tokens", "(true) is not supported: the chat template writes them")
    return chat_input(request, request.messages, has_tools=bool(functions_of(request.tools or ())))


_OF_CHATS: Final = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort")


def embed_requests(request: EmbeddingsRequest, request_id: str) -> tuple[EmbedRequest, ...]:
    """Return one request for each input. Raises RequestError."""
    inputs = prompts_of(request.input)
    same: dict[str, Any] = {
        "model": request.model or "",
        "cache_salt": request.cache_salt or "",
        "priority": request.priority,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "dimensions": request.dimensions,
        "normalize": request.normalize,
    }
    return tuple(
        EmbedRequest(request_id=each_id, text=each, **same)
        if isinstance(each, str)
        else EmbedRequest(request_id=each_id, tokenized=TokenizedInput(input_ids=each), **same)
        for each_id, each in zip(ids_of(request_id, len(inputs)), inputs, strict=True)
    )


# ---- SLO and priority: in the body, or in headers, which gateways can set without parsing the body ----

_HEADERS: Final = {
    "ttft_ms": "x-slo-ttft-ms",
    "tpot_ms": "x-slo-tpot-ms",
    "slo_class": "x-slo-class",
    "priority": "x-slo-priority",
}
DEFAULT_TIER: Final = "default"
_INTEGER: Final = re.compile(r"-?[0-9]{1,9}")


def set_limits(
    requests: Sequence[GenerateRequest | ScoreRequest],
    request: Scheduled | Scoring,
    headers: Mapping[str, str],
    slo_classes: Collection[str] = (),
) -> dict[str, str]:
    """Set SLO, class and priority in all requests of a call, those that its endpoint has; the body overrides headers.

    A service tier that is one of the operator's SLO classes is the class of a request that names none. Returns the
    headers that were used, by field. Raises RequestError.
    """
    values = {name: getattr(request, name) for name in _HEADERS if name in type(request).model_fields}
    taken = {name: _HEADERS[name] for name in values if values[name] is None and _HEADERS[name] in headers}
    values |= {name: _read(name, header, headers[header]) for name, header in taken.items()}
    if isinstance(request, Scheduled) and values["slo_class"] is None and request.service_tier in slo_classes:
        values["slo_class"] = request.service_tier
    for name, value in values.items():
        for each in requests if value is not None else ():
            setattr(each, name, value)
    return taken


def service_tier(requests: Sequence[GenerateRequest], request: Scheduled) -> str | None:
    """Return the service tier for the response: the SLO class, or DEFAULT_TIER without one; None if none was asked
    for."""
    return None if request.service_tier is None else requests[0].slo_class or DEFAULT_TIER


def _read(name: str, header: str, text: str) -> Any:
    if name == "slo_class":
        return text
    return _integer(header, text) if name == "priority" else _number(header, text)


def _number(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise bad(header, f"must be a finite number, not {text[:80]!r}")
    return value


def _integer(header: str, text: str) -> int:
    if not (_INTEGER.fullmatch(text) and abs(int(text)) <= MAX_PRIORITY):
        raise bad(header, f"must be an integer within [{-MAX_PRIORITY}, {MAX_PRIORITY}], not {text[:80]!r}")
    return int(text)
