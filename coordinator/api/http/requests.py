"""Convert the JSON of OpenAI's endpoints to GenerateRequest messages. Performs no I/O.

This module checks which fields there are (known_fields.py) and their types. Their values are checked where the gRPC API
checks them. `Fields.unread` returns the unknown fields.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from coordinator.api.http.conversations import parse_conversation, parse_conversations
from coordinator.api.http.fields import INT64, UINT32, Fields, shown
from coordinator.api.http.known_fields import BATCH, CHAT, COMPLETIONS, settle
from coordinator.api.http.tools import Offer, parse_offer
from coordinator.api.prompts import USUAL, WHAT_FITS, Terms
from coordinator.api.validation import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_CONSTRAINT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    WHOLE_VOCABULARY,
    bad,
)
from coordinator.text.answer_format import PLAIN, AnswerFormat
from coordinator.text.constraints import Leeway
from protos.inference_pb2 import ChatInput, Choice, GenerateRequest, SamplingParams, TokenizedInput
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

MAX_PROMPTS: Final = 256
MAX_CONVERSATIONS: Final = 256
MAX_COPIED_BYTES: Final = 2**27
MAX_SCORED_PROMPTS: Final = 16  # each has up to validation.MAX_PROMPT_LOGPROBS logprobs
DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's
LEFT, RIGHT = "left", "right"
SIDES: Final = (LEFT, RIGHT)  # sides of a prompt that truncation may remove

_NUMBERS: Final = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_INTEGERS: Final = ("top_k", "min_tokens", "prompt_logprobs")
_BOOLEANS: Final = ("skip_special_tokens", "ignore_eos", "include_stop_str_in_output")

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
class Asked:
    """One call of an endpoint.

    `requests` has one request for each prompt, each with `num_answers` sequences. `names` maps gRPC field names to the
    names that the client has sent.
    """

    requests: tuple[GenerateRequest, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    num_answers: int = 1
    stream: bool = False
    include_usage: bool = False  # in a last event of a stream
    continuous_usage: bool = False  # in every event of a stream
    return_token_ids: bool = False
    include_timeline: bool = False
    echoes: bool = False  # outputs begin with the prompt and its logprobs, or with the assistant's message
    is_scored: bool = False  # prompt logprobs have a field of their own
    tokens_as_ids: bool = False  # in logprobs
    scores_content: bool = False  # logprobs cover the content without thoughts and tool calls
    tells_thoughts: bool = True
    offer: Offer | None = None  # tools that the output may call
    terms: Terms = USUAL


def parse_completion(fields: Fields, request_id: str) -> Asked:
    """Parse a call of /v1/completions. Raises RequestError."""
    settle(fields, COMPLETIONS)
    params = _sampling_params(fields)
    max_tokens, echoes = fields.integer("max_tokens"), fields.boolean("echo") or False
    if max_tokens is None and fields.integer("truncate_prompt_tokens") == WHAT_FITS:
        max_tokens = DEFAULT_COMPLETION_TOKENS  # truncation leaves room for as many
    if max_tokens is not None:
        params.max_tokens = max_tokens
    num_top = fields.integer("logprobs")
    if num_top is not None:
        params.logprobs = num_top
        if echoes:
            params.prompt_logprobs = _more(num_top, params.prompt_logprobs)
    prompts = _prompts(fields)
    if params.HasField("prompt_logprobs") and len(prompts) > MAX_SCORED_PROMPTS:
        raise fields.problem(
            "prompt", f"has {len(prompts)} prompts; with their logprobs the limit is {MAX_SCORED_PROMPTS}"
        )
    asked = _asked(fields, _requests(fields, params, request_id, prompts))
    drops_answers = echoes and max_tokens == 0
    terms = replace(asked.terms, default_max_tokens=DEFAULT_COMPLETION_TOKENS, drops_answers=drops_answers)
    names = {**COMPLETION_NAMES, **asked.names}
    if echoes and "prompt_logprobs" not in fields:
        names["prompt_logprobs"] = "logprobs"
    return replace(asked, names=names, echoes=echoes, terms=terms)


def _more(num: int, other: int) -> int:
    return WHOLE_VOCABULARY if WHOLE_VOCABULARY in (num, other) else max(num, other)


def parse_chat(fields: Fields, request_id: str, answer_format: AnswerFormat = PLAIN) -> Asked:
    """Parse a call of /v1/chat/completions. Raises RequestError."""
    settle(fields, CHAT)
    params, offer = _chat_params(fields, answer_format)
    chat = parse_conversation(fields, has_tools=offer is not None)
    return _asked_of_chats(fields, _requests(fields, params, request_id, [chat]), answer_format, offer)


def parse_batch(fields: Fields, request_id: str, answer_format: AnswerFormat = PLAIN) -> Asked:
    """Parse a call of /v1/chat/completions/batch, which has no tools. Raises RequestError."""
    settle(fields, BATCH)
    params, offer = _chat_params(fields, answer_format)
    chats = parse_conversations(fields, MAX_CONVERSATIONS)
    return _asked_of_chats(fields, _requests(fields, params, request_id, chats), answer_format, offer)


def _chat_params(fields: Fields, answer_format: AnswerFormat) -> tuple[SamplingParams, Offer | None]:
    params = _sampling_params(fields)
    max_tokens, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if newer is not None:
        max_tokens = newer
    if max_tokens is not None:
        params.max_tokens = max_tokens
    num_top = _chat_logprobs(fields)
    if num_top is not None:
        params.logprobs = num_top
    offer = parse_offer(fields, answer_format)
    if offer is None:
        return params, offer
    if offer.schema:
        if "structured_outputs" in fields:
            raise fields.problem("tool_choice", "cannot be had beside structured_outputs: one of them says what comes")
        params.json_schema = offer.schema  # response_format applies to an output without tool calls
    elif (
        params.WhichOneof("constraint") and (num := sum(len(schema) for _, schema in offer.held)) > MAX_CONSTRAINT_CHARS
    ):
        problem = f"have strict schemas of {num} characters, beside a form the limit is {MAX_CONSTRAINT_CHARS}"
        raise fields.problem("tools", problem)
    if not offer.schema and answer_format.needs_special_tokens and "skip_special_tokens" not in fields:
        params.skip_special_tokens = False
    return params, offer


def _prompts(fields: Fields) -> list[Prompt]:
    """Return the prompts: a string, token ids, or a list of either."""
    prompt = fields.raw("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) and len(prompt) > MAX_PROMPTS:
        raise fields.problem("prompt", f"has {len(prompt)} prompts, the limit is {MAX_PROMPTS}")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        lists = fields.lists("prompt", MAX_PROMPTS)
        prompts: list[Prompt] = [TokenizedInput(input_ids=item.integers("")) for item in lists]
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        prompts = [TokenizedInput(input_ids=fields.integers("prompt"))]
    else:
        prompts = [*fields.texts("prompt", MAX_PROMPTS)]
    if not prompts:
        raise fields.problem("prompt", "is missing or empty: send a string, token ids, or a list of either")
    return prompts


def _requests(
    fields: Fields, params: SamplingParams, request_id: str, prompts: Sequence[Prompt]
) -> list[GenerateRequest]:
    """Return one request for each prompt. Raises RequestError when the copies of the other fields need too much
    memory."""
    if (num_bytes := len(prompts) * params.ByteSize()) > MAX_COPIED_BYTES:
        problem = f"the {len(prompts)} prompts' sampling fields have {num_bytes} bytes, the limit is {MAX_COPIED_BYTES}"
        raise RequestError(BAD_PARAM, problem)
    ids = ids_of(request_id, len(prompts))
    return [_request(fields, params, each_id, prompt) for each_id, prompt in zip(ids, prompts, strict=True)]


def _request(fields: Fields, params: SamplingParams, request_id: str, prompt: Prompt) -> GenerateRequest:
    request = GenerateRequest(
        request_id=request_id,
        model=fields.text("model") or "",
        cache_salt=fields.text("cache_salt") or "",
        sampling_params=params,
        truncate_prompt_tokens=fields.integer("truncate_prompt_tokens"),
    )
    match prompt:
        case str():
            request.text = prompt
        case TokenizedInput():
            request.tokenized.CopyFrom(prompt)
        case ChatInput():
            request.chat.CopyFrom(prompt)
    return request


def _asked(fields: Fields, requests: list[GenerateRequest]) -> Asked:
    stream, is_scored = fields.boolean("stream") or False, fields.raw("prompt_logprobs") is not None
    if stream and is_scored:
        raise fields.problem("prompt_logprobs", "is not supported in a stream")
    options = fields.nested("stream_options")
    if options is not None and not stream:
        raise fields.problem("stream_options", "needs stream: true")
    includes_usage, is_continuous = _usage_options(options or Fields({}))
    if (side := fields.text("truncation_side")) not in (None, *SIDES):
        raise fields.error("truncation_side", f"one of {', '.join(SIDES)}")
    return Asked(
        requests=tuple(requests),
        names=constraint_names(fields),
        terms=Terms(keeps_first=side == RIGHT),
        num_answers=fields.integer("n") or 1,
        stream=stream,
        include_usage=includes_usage,
        continuous_usage=includes_usage and is_continuous,
        return_token_ids=fields.boolean("return_token_ids") or False,
        include_timeline=fields.boolean("include_timeline") or False,
        is_scored=is_scored,
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids") or False,
    )


def _asked_of_chats(
    fields: Fields, requests: list[GenerateRequest], answer_format: AnswerFormat, offer: Offer | None
) -> Asked:
    tells_thoughts = fields.boolean("include_reasoning") is not False
    leeway = Leeway(answer_format.thinks, loose=offer.loose if offer is not None else ())
    if offer is not None and offer.held:
        leeway = replace(leeway, calls=answer_format.calls, tools=offer.held, most_calls=offer.most_calls)
    asked = _asked(fields, requests)
    names = {**CHAT_NAMES, **asked.names}
    if "max_completion_tokens" in fields:
        names["max_tokens"] = "max_completion_tokens"
    return replace(
        asked,
        names=names,
        echoes=fields.boolean("echo") or False,
        offer=offer,
        terms=replace(asked.terms, leeway=leeway),
        tells_thoughts=tells_thoughts,
    )


def _usage_options(options: Fields) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether every event has the usage."""
    options.raw("include_obfuscation")
    return options.boolean("include_usage") or False, options.boolean("continuous_usage_stats") or False


def _sampling_params(fields: Fields) -> SamplingParams:
    """Return the sampling parameters that both endpoints have."""
    given: dict[str, Any] = {}
    readers: list[tuple[tuple[str, ...], Callable[[str], Any]]] = [
        (_NUMBERS, fields.number),
        (_INTEGERS, fields.integer),
        (_BOOLEANS, fields.boolean),
    ]
    for names, read in readers:
        given |= {name: read(name) for name in names if name in fields}
    return SamplingParams(
        **given,
        n=fields.integer("n", (1, MAX_ANSWERS)),
        seed=fields.integer("seed", INT64),
        stop=fields.texts("stop", MAX_STOP_STRINGS),
        stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_TOKEN_IDS),
        allowed_token_ids=_allowed_token_ids(fields),
        bad_words=fields.texts("bad_words", MAX_BAD_WORDS),
        logprob_token_ids=fields.integers("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
        logit_bias=_logit_bias(fields),
        **read_constraint(fields),
    )


def _allowed_token_ids(fields: Fields) -> list[int]:
    token_ids = fields.integers("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
    if not token_ids and "allowed_token_ids" in fields:
        raise fields.problem("allowed_token_ids", "is empty: an answer needs at least one token")
    return token_ids


def _logit_bias(fields: Fields) -> dict[int, float]:
    given = fields.raw("logit_bias")
    biases = fields.nested("logit_bias", MAX_LOGIT_BIAS) or Fields({})
    found: dict[int, float] = {}
    for token in given or {}:
        if not (token.isascii() and token.isdigit() and len(token) <= len(str(UINT32[1]))) or int(token) > UINT32[1]:
            raise fields.problem("logit_bias", f"has the key {shown(token)}, which is no token id")
        bias = biases.number(token)
        found[int(token)] = 0.0 if bias is None else bias
    return found


def _chat_logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("top_logprobs")
    if fields.boolean("logprobs"):
        return num_top or 0
    if num_top:
        raise fields.problem("top_logprobs", "needs logprobs: true")
    return None


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
WITHOUT_EFFECT: Final = ("name", "description", "strict")  # of a schema, which is enforced in any case


def read_constraint(fields: Fields) -> dict[str, Any]:
    """Return the constraint fields of SamplingParams. Raises RequestError."""
    form, outputs = fields.nested("response_format"), fields.nested("structured_outputs")
    asked = {} if form is None else _of_form(fields, form)
    if outputs is None:
        return asked
    if asked:
        raise fields.problem("structured_outputs", "cannot be had beside response_format: one of them says what comes")
    return _of_outputs(fields, outputs)


def constraint_names(fields: Fields) -> dict[str, str]:
    """Map the constraint fields of SamplingParams to the client's field names."""
    if "structured_outputs" in fields:
        names = (*KINDS, "whitespace_pattern")
        return {"json_schema": "structured_outputs.json", **{name: f"structured_outputs.{name}" for name in names}}
    match fields.raw("response_format"):
        case {"type": "json_schema"}:
            return {"json_schema": "response_format.json_schema.schema"}
        case {"type": "json_object"}:
            return {"json_schema": "response_format.schema", "json_object": "response_format"}
    return {}


def _of_form(fields: Fields, form: Fields) -> dict[str, Any]:
    match kind := form.text("type"):
        case "text":
            return {}
        case "json_object" if "schema" in form:  # as in llama.cpp and others
            return {"json_schema": _schema(form, "schema")}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            given = form.nested("json_schema")
            if given is None:
                raise form.error("json_schema", "an object with a schema")
            for name in WITHOUT_EFFECT:
                given.raw(name)
            return {"json_schema": _schema(given, "schema")}
    raise fields.problem("response_format", f"of type {shown(kind)} is not supported")


def _of_outputs(fields: Fields, outputs: Fields) -> dict[str, Any]:
    if outputs.raw("structural_tag"):
        raise outputs.problem("structural_tag", "is not supported")
    outputs.boolean("disable_fallback")  # there is no fallback
    kinds = [name for name in KINDS if outputs.raw(name) not in (None, False)]
    if len(kinds) != 1:
        raise fields.problem("structured_outputs", f"must have one of {', '.join(KINDS)}, not {len(kinds)}")
    options = {
        "disable_any_whitespace": outputs.boolean("disable_any_whitespace"),
        "disable_additional_properties": outputs.boolean("disable_additional_properties"),
        "whitespace_pattern": outputs.text("whitespace_pattern"),
    }
    return {**_of_kind(outputs, kinds[0]), **{name: value for name, value in options.items() if value is not None}}


def _of_kind(outputs: Fields, kind: str) -> dict[str, Any]:
    match kind:
        case "json":
            return {"json_schema": _schema(outputs, "json")}
        case "json_object":
            return {"json_object": outputs.boolean("json_object")}
        case "choice":
            return {"choice": Choice(choices=outputs.texts("choice", MAX_CHOICES))}
    return {kind: outputs.text(kind)}


def _schema(fields: Fields, name: str) -> str:
    """Return a schema as text; its validity is checked when it is compiled."""
    schema = fields.raw(name)
    if name == "json" and isinstance(schema, str):
        return fields.text(name) or ""
    if not isinstance(schema, dict):
        raise fields.error(name, "an object")
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise fields.problem(name, "is nested too deeply") from error
