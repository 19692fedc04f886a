"""Build the request messages of both clients and the command line."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypedDict, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as WireMessage

from protos import inference_pb2
from splitserve.client.errors import Refused, bad_argument

TIMEOUT_S: Final = 600.0
"""Default deadline of a call, and of a whole output."""

Message = Mapping[str, Any]
"""One turn of a conversation: `role` (system, user or assistant) and `content`, a text or a list of text parts.

Other fields, such as tool_calls, are passed to the chat template.
"""

Prompt = str | Sequence[int] | Sequence[Message]
"""A text used unchanged, token ids, or a conversation for the model's chat template."""


class Sampling(TypedDict, total=False):
    """Sampling parameters of a request.

    A field that is missing or None takes the server's default, which for some fields is the model's own:
    `ModelInfo.default_sampling_params`.
    """

    temperature: Annotated[float | None, "0 (or less than 1e-6) is greedy; default: the model's own, else 1."]
    top_p: Annotated[
        float | None, "Sample from the smallest set of tokens with this probability; default: the model's own, else 1."
    ]
    top_k: Annotated[int | None, "Only the k most likely tokens, 0: all; default: the model's own, else 0."]
    min_p: Annotated[
        float | None, "Only tokens with this fraction of the top token's probability; default: the model's own, else 0."
    ]
    frequency_penalty: Annotated[float | None, "Per earlier use of a token in the output, -2 to 2; default 0."]
    presence_penalty: Annotated[float | None, "For tokens used in the output, -2 to 2; default 0."]
    repetition_penalty: Annotated[
        float | None, "Divides logits of tokens seen, above 0; default: the model's own, else 1."
    ]
    max_tokens: Annotated[
        int | None, "Most tokens of an output; default: the model's own, else the rest of the context."
    ]
    min_tokens: Annotated[int | None, "Fewest tokens before the output may stop; default 0."]
    stop: Annotated[str | Sequence[str] | None, "Text that ends the output."]
    stop_token_ids: Annotated[Sequence[int] | None, "Token id that ends the output."]
    allowed_token_ids: Annotated[Sequence[int] | None, "Token id that is allowed; no others are."]
    bad_words: Annotated[str | Sequence[str] | None, "Text that is excluded, in its usual tokens."]
    bad_tokens: Annotated[Sequence[Sequence[int]] | None, "Sequence of token ids that is excluded."]
    skip_special_tokens: Annotated[bool | None, "Leave special tokens out of the text; default true."]
    ignore_eos: Annotated[bool | None, "Continue after the end-of-sequence token; default false."]
    n: Annotated[int | None, "Number of outputs; default 1."]
    logprobs: Annotated[int | None, "Logprobs of each token and of this many most likely tokens; default off."]
    logprob_token_ids: Annotated[
        Sequence[int] | None, "Token id whose logprob is returned instead of the most likely tokens'; needs logprobs."
    ]
    prompt_logprobs: Annotated[int | None, "Logprobs of the prompt's tokens after the first; default off."]
    seed: Annotated[int | None, "Seed that makes sampling repeatable; default: drawn by the server."]
    include_stop_str_in_output: Annotated[bool | None, "Keep the stop string in the text; default false."]
    logit_bias: Annotated[Mapping[int, float] | None, "Added to the logit of a token id."]
    json_schema: Annotated[str | Mapping[str, Any] | None, "JSON schema that is enforced on the output."]
    json_object: Annotated[bool | None, "Enforce a JSON object; default false."]
    regex: Annotated[str | None, "Regular expression that is enforced on the whole output."]
    grammar: Annotated[str | None, "Grammar, in Lark or GBNF, that is enforced on the output."]
    choice: Annotated[Sequence[str] | None, "Text that the output may be; one of the given texts is enforced."]
    disable_any_whitespace: Annotated[bool | None, "No whitespace between the tokens of JSON; default false."]
    whitespace_pattern: Annotated[
        str | None, "Regular expression of the whitespace in JSON; default: up to 40 characters."
    ]
    disable_additional_properties: Annotated[
        bool | None, "Allow only the properties that the schema's objects name; default: the server's."
    ]


def embed_request(
    text: str | Sequence[int],
    *,
    model: str,
    request_id: str,
    cache_salt: str,
    priority: int | None,
    truncate_prompt_tokens: int | None,
    dimensions: int | None,
    normalize: bool | None,
) -> inference_pb2.EmbedRequest:
    """Return the EmbedRequest of these values; None leaves a field unset.

    Raises Refused for a value that the message cannot hold.
    """
    fields = {
        "request_id": request_id,
        "model": model,
        "cache_salt": cache_salt,
        "priority": priority,
        "truncate_prompt_tokens": truncate_prompt_tokens,
        "dimensions": dimensions,
        "normalize": normalize,
    }
    request = filled(inference_pb2.EmbedRequest(), fields)
    if isinstance(text, str):
        return filled(request, {"text": text})
    request.tokenized.CopyFrom(_tokenized("text", text, "text or token ids"))
    return request


def score_request(
    prompt: str | Sequence[Message],
    items: Sequence[tuple[str, Sequence[str]]],
    *,
    model: str,
    request_id: str,
    cache_salt: str,
    ttft_ms: float | None,
    slo_class: str,
    priority: int | None,
) -> inference_pb2.ScoreRequest:
    """Return a ScoreRequest. Raises Refused for a value that protobuf cannot represent."""
    fields = {
        "request_id": request_id,
        "model": model,
        "cache_salt": cache_salt,
        "ttft_ms": ttft_ms,
        "slo_class": slo_class,
        "priority": priority,
    }
    request = filled(inference_pb2.ScoreRequest(), fields)
    request.items.extend(
        filled(inference_pb2.ScoreItem(), {"text": text, "labels": _listed("labels", labels, "a list of texts")})
        for text, labels in items
    )
    if isinstance(prompt, str):
        return filled(request, {"text": prompt}, {"text": "prompt"})
    request.chat.CopyFrom(chat_input(prompt))
    return request


def generate_request(
    prompt: Prompt,
    *,
    model: str,
    request_id: str,
    cache_salt: str,
    sampling: Mapping[str, Any],
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    slo_class: str = "",
    priority: int | None = None,
    chat: bool = False,
) -> inference_pb2.GenerateRequest:
    """Return the GenerateRequest of a prompt; None leaves a field unset.

    With `chat`, a text is a user message. `sampling` has fields of Sampling. Raises TypeError for an unknown one of
    them, and Refused for a value that the message cannot hold.
    """
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    fields = {
        "request_id": request_id,
        "model": model,
        "cache_salt": cache_salt,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "slo_class": slo_class,
        "priority": priority,
    }
    request = filled(inference_pb2.GenerateRequest(), fields)
    request.sampling_params.CopyFrom(_sampling_params(sampling))
    if isinstance(prompt, str):
        return filled(request, {"text": prompt}, {"text": "prompt"})
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(chat_input(cast("Sequence[Message]", prompt)))
    else:
        request.tokenized.CopyFrom(_tokenized("prompt", prompt, "text, token ids or a conversation"))
    return request


def abort_request(request_ids: str | Sequence[str]) -> inference_pb2.AbortRequest:
    """Return the AbortRequest for one id or several. Raises Refused for a value that is no id."""
    ids = [request_ids] if isinstance(request_ids, str) else request_ids
    return filled(inference_pb2.AbortRequest(), {"request_ids": ids})


def _sampling_params(sampling: Mapping[str, Any]) -> inference_pb2.SamplingParams:
    if unknown := sorted(set(sampling) - set(Sampling.__annotations__)):
        raise TypeError(f"unknown sampling fields: {', '.join(unknown)}")
    given = dict(sampling)
    for name in ("stop", "choice", "bad_words"):
        if isinstance(given.get(name), str):
            given[name] = [given[name]]
    if isinstance(given.get("json_schema"), Mapping):
        given["json_schema"] = as_json("json_schema", given["json_schema"])
    if (choice := given.get("choice")) is not None:
        given["choice"] = filled(inference_pb2.Choice(), {"choices": choice}, {"choices": "choice"})
    if (runs := given.get("bad_tokens")) is not None:
        given["bad_tokens"] = _token_runs("bad_tokens", runs)
    return filled(inference_pb2.SamplingParams(), given)


def _token_runs(name: str, runs: Any) -> list[inference_pb2.TokenizedInput]:
    expected = "a list of lists of token ids"
    return [_tokenized(name, run, expected) for run in _listed(name, runs, expected)]


def _tokenized(name: str, token_ids: Any, expected: str) -> inference_pb2.TokenizedInput:
    given = {"input_ids": _listed(name, token_ids, expected)}
    return filled(inference_pb2.TokenizedInput(), given, {"input_ids": name})


def _listed(name: str, value: Any, expected: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, BYTES):
        raise refused(name, f"must be {expected}", value)
    return value


# ---- Messages filled field by field, so that an error names the wrong field ----

M = TypeVar("M", bound=WireMessage)

MAX_SHOWN_CHARS: Final = 80
BYTES: Final = (bytes, bytearray, memoryview)  # a list of integers to Python and text to protobuf: never intended

_KINDS: Final = {
    FieldDescriptor.CPPTYPE_BOOL: ("true or false", "bools"),
    FieldDescriptor.CPPTYPE_DOUBLE: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_INT32: ("an integer of 32 bits", "integers of 32 bits"),
    FieldDescriptor.CPPTYPE_INT64: ("an integer of 64 bits", "integers of 64 bits"),
    FieldDescriptor.CPPTYPE_STRING: ("a string of valid Unicode", "strings of valid Unicode"),
    FieldDescriptor.CPPTYPE_UINT32: ("an integer from 0 to 2**32 - 1", "integers from 0 to 2**32 - 1"),
}


def filled(message: M, fields: dict[str, Any], names: dict[str, str] | None = None) -> M:
    """Set these fields of the message, in place, and return it; None leaves a field unset.

    Raises Refused for a value that the field cannot hold. Its message names a field by `names`, or else by its own
    name.
    """
    for field, value in fields.items():
        if value is None:
            continue
        try:
            if isinstance(value, BYTES):
                raise TypeError("bytes")
            message.MergeFrom(type(message)(**{field: value}))
        except (TypeError, ValueError) as error:
            expected = _expected(message.DESCRIPTOR.fields_by_name[field])
            raise refused((names or {}).get(field, field), f"must be {expected}", value) from error
    return message


def refused(name: str, problem: str, value: object) -> Refused:
    """Return the error for an invalid argument: its name, the problem, and the value in at most MAX_SHOWN_CHARS."""
    shown = repr(value)
    if len(shown) > MAX_SHOWN_CHARS:
        shown = shown[: MAX_SHOWN_CHARS - 3] + "..."
    return bad_argument(f"{name} {problem}, not {shown}", field=name)


def _expected(field: Any) -> str:
    """Return what a field with this descriptor accepts."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_KINDS[each.cpp_type][1] for each in field.message_type.fields)
        return f"a mapping of {key} to {value}"
    one, many = _KINDS[field.cpp_type]
    return f"a list of {many}" if field.is_repeated else one


# ---- Conversations in OpenAI's format, as messages ----

ASSISTANT: Final = "assistant"
OWN_FIELDS: Final = ("role", "content", "extra_json")


def chat_input(messages: Sequence[Message]) -> inference_pb2.ChatInput:
    """Return the ChatInput of a conversation in OpenAI's format. Raises Refused, which names the invalid message."""
    return inference_pb2.ChatInput(messages=[_message(f"prompt[{i}]", each) for i, each in enumerate(messages)])


def _message(name: str, message: Message) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise refused(name, "must be a message", message)
    extra = {key: value for key, value in message.items() if key not in OWN_FIELDS and value is not None}
    if extra and message.get("extra_json"):
        raise bad_argument(f"{name} has extra_json, and fields that belong into it: {', '.join(extra)}", field=name)
    if calls := extra.get("tool_calls"):
        extra["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    content = message.get("content")
    if content is None and message.get("role") != ASSISTANT:
        raise bad_argument(f"{name} has no content", field=name)
    fields = {
        "role": message.get("role"),
        **_content(f"{name}.content", content),
        "extra_json": as_json(name, extra) if extra else message.get("extra_json"),
    }
    return filled(inference_pb2.ChatMessage(), fields, {field: f"{name}.{field}" for field in fields})


def _content(name: str, content: Any) -> dict[str, Any]:
    """Return the field for a message's content: content_parts for a list of text parts, else content. Raises
    Refused."""
    if not isinstance(content, list):
        return {"content": content}
    for index, part in enumerate(content):
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise refused(f"{name}[{index}]", "must be a text part: models read text alone", part)
    return {"content_parts": [part["text"] for part in content]}


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates expect; OpenAI has JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        read = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call


def as_json(name: str, value: Any) -> str:
    """Return a value as JSON text. Raises Refused, with `name` as the field, when that is not possible."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_argument(f"{name} cannot be written as JSON: {error}", field=name) from error
