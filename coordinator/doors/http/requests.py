"""From the JSON of OpenAI's endpoints to the requests that both doors understand. Pure.

What is checked here is the form: which fields there are and of which kind. Values are checked where those of the gRPC
door are. Fields that would change the answer and cannot be honoured are refused; `Fields.unread` names those that
nobody knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from coordinator.doors.http.fields import INT64, UINT32, Fields, shown
from coordinator.doors.validation import MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from protos.inference_pb2 import ChatInput, ChatMessage, GenerateRequest, SamplingParams, TokenizedInput

MAX_PROMPTS: Final = 256
MAX_PARTS: Final = 1024  # of one message
DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's

_NUMBERS: Final = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_INTEGERS: Final = ("top_k", "min_tokens", "n")
_BOOLEANS: Final = ("skip_special_tokens", "ignore_eos", "include_stop_str_in_output")

# Fields that change the answer and are not supported, with the values that ask for nothing.
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "logits_processors": ([],),
    "suffix": ("",),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_UNSUPPORTED_IN_COMPLETIONS: Final[Mapping[str, tuple[Any, ...]]] = {**_UNSUPPORTED, "add_special_tokens": (True,)}
_UNSUPPORTED_IN_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    **_UNSUPPORTED,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}

# Fields of OpenAI's that change nothing in an answer.
_WITHOUT_EFFECT: Final = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

# The fields of an endpoint by the names that the gRPC door has for them.
COMPLETION_NAMES: Final = {"text": "prompt", "tokenized.input_ids": "prompt", "input": "prompt"}
CHAT_NAMES: Final = {"chat": "messages", "chat.messages": "messages", "input": "messages", "logprobs": "top_logprobs"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of an endpoint. `requests` are one for each prompt, each with num_answers answers."""

    requests: tuple[GenerateRequest, ...]
    num_answers: int = 1
    stream: bool = False
    include_usage: bool = False  # in a last event of a stream
    continuous_usage: bool = False  # in every event of a stream
    return_token_ids: bool = False
    include_timeline: bool = False


def parse_completion(fields: Fields, request_id: str) -> Asked:
    """A call of /v1/completions. Raises RequestError."""
    _refuse_unsupported(fields, _UNSUPPORTED_IN_COMPLETIONS)
    _check_response_format(fields)
    params = _sampling_params(fields)
    max_tokens = fields.integer("max_tokens")
    params.max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    num_top = fields.integer("logprobs")
    if num_top is not None:
        params.logprobs = num_top
    prompts = _prompts(fields)
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
    requests = [_request(fields, params, each_id, prompt) for each_id, prompt in zip(ids, prompts, strict=True)]
    return _asked(fields, requests)


def parse_chat(fields: Fields, request_id: str) -> Asked:
    """A call of /v1/chat/completions. Raises RequestError."""
    _refuse_unsupported(fields, _UNSUPPORTED_IN_CHAT)
    _check_response_format(fields)
    params = _sampling_params(fields)
    max_tokens, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if newer is not None:
        max_tokens = newer
    if max_tokens is not None:
        params.max_tokens = max_tokens
    num_top = _chat_logprobs(fields)
    if num_top is not None:
        params.logprobs = num_top
    chat = ChatInput(messages=parse_messages(fields))
    return _asked(fields, [_request(fields, params, request_id, chat)])


def parse_messages(fields: Fields) -> list[ChatMessage]:
    """The conversation in `messages`. Raises RequestError."""
    messages = fields.objects("messages", MAX_MESSAGES)
    if not messages:
        raise fields.problem("messages", "is missing or empty: a conversation needs at least one message")
    return [_message(message) for message in messages]


def _message(message: Fields) -> ChatMessage:
    role = message.text("role")
    if not role:
        raise message.error("role", "a string such as user")
    for name in ("tool_calls", "function_call"):
        if message.raw(name):
            raise message.problem(name, "is not supported")
    if isinstance(message.raw("content"), list):
        content = "\n".join(_text_of(part) for part in message.objects("content", MAX_PARTS))
    else:
        content = message.text("content") or ""
        if "content" not in message:
            raise message.error("content", "a string or a list of text parts")
    return ChatMessage(role=role, content=content)


def _text_of(part: Fields) -> str:
    kind = part.text("type")
    if kind != "text":
        raise part.problem("type", f"{shown(kind)} is not supported: this model reads text alone")
    text = part.text("text")
    if text is None:
        raise part.error("text", "a string")
    return text


def _prompts(fields: Fields) -> list[str | TokenizedInput]:
    """A string, token ids, or a list of either."""
    prompt = fields.raw("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) and len(prompt) > MAX_PROMPTS:
        raise fields.problem("prompt", f"has {len(prompt)} prompts, the limit is {MAX_PROMPTS}")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        lists = [Fields({"prompt": item}) for item in prompt]
        prompts: list[str | TokenizedInput] = [TokenizedInput(input_ids=item.integers("prompt")) for item in lists]
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        prompts = [TokenizedInput(input_ids=fields.integers("prompt"))]
    else:
        prompts = [*fields.texts("prompt", MAX_PROMPTS)]
    if not prompts:
        raise fields.problem("prompt", "is missing or empty: send a string, token ids, or a list of either")
    return prompts


def _request(
    fields: Fields, params: SamplingParams, request_id: str, prompt: str | TokenizedInput | ChatInput
) -> GenerateRequest:
    request = GenerateRequest(
        request_id=request_id,
        model=fields.text("model") or "",
        cache_salt=fields.text("cache_salt") or "",
        sampling_params=params,
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
    for name in _WITHOUT_EFFECT:
        fields.raw(name)
    options = fields.nested("stream_options") or Fields({})
    options.raw("include_obfuscation")
    return Asked(
        requests=tuple(requests),
        num_answers=fields.integer("n") or 1,
        stream=fields.boolean("stream") or False,
        include_usage=options.boolean("include_usage") or False,
        continuous_usage=options.boolean("continuous_usage_stats") or False,
        return_token_ids=fields.boolean("return_token_ids") or False,
        include_timeline=fields.boolean("include_timeline") or False,
    )


def _sampling_params(fields: Fields) -> SamplingParams:
    """What both endpoints know."""
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
        seed=fields.integer("seed", INT64),
        stop=fields.texts("stop", MAX_STOP_STRINGS),
        stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_TOKEN_IDS),
        logit_bias=_logit_bias(fields),
    )


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


def _check_response_format(fields: Fields) -> None:
    form = fields.nested("response_format")
    if form is not None and form.text("type") != "text":
        raise fields.problem("response_format", f"of type {shown(form.raw('type'))} is not supported")


def _refuse_unsupported(fields: Fields, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    for name, harmless in unsupported.items():
        value = fields.raw(name)
        # True == 1 for Python, but not for a client.
        if value is not None and not any(type(value) is type(each) and value == each for each in harmless):
            raise fields.problem(name, f"({shown(value)}) is not supported")
