"""What a client may ask, as wire messages. Both clients and the command line build their requests here."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypedDict, cast

from protos import inference_pb2
from splitserve.client.conversations import Message, as_json, chat_input
from splitserve.client.wire_fields import BYTES, filled, refused

TIMEOUT_S: Final = 600.0
"""What a call, or a whole answer, may take where nobody says."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text as it stands, token ids, or a conversation for the model's chat template."""


class Sampling(TypedDict, total=False):
    """How the answer is sampled. What is left out, or None, takes the server's default, which for some fields is the
    model's own: `ModelInfo.default_sampling_params`."""

    temperature: Annotated[float | None, "0 (or less than 1e-6) is greedy; default: the model's own, else 1."]
    top_p: Annotated[
        float | None, "Smallest set of tokens whose probability reaches this; default: the model's own, else 1."
    ]
    top_k: Annotated[int | None, "Only the k most likely tokens, 0: all; default: the model's own, else 0."]
    min_p: Annotated[
        float | None, "Only tokens with this share of the top token's probability; default: the model's own, else 0."
    ]
    frequency_penalty: Annotated[float | None, "Per earlier use of a token in the answer, -2 to 2; default 0."]
    presence_penalty: Annotated[float | None, "For tokens used in the answer, -2 to 2; default 0."]
    repetition_penalty: Annotated[
        float | None, "Divides logits of tokens seen, above 0; default: the model's own, else 1."
    ]
    max_tokens: Annotated[
        int | None, "Most tokens of the answer; default: the model's own, else what the context still holds."
    ]
    min_tokens: Annotated[int | None, "Fewest tokens before the answer may stop; default 0."]
    stop: Annotated[str | Sequence[str] | None, "Text that ends the answer."]
    stop_token_ids: Annotated[Sequence[int] | None, "Token id that ends the answer."]
    allowed_token_ids: Annotated[Sequence[int] | None, "Token id that may come; no others may."]
    bad_words: Annotated[str | Sequence[str] | None, "Text that does not come, in the tokens that usually spell it."]
    bad_tokens: Annotated[Sequence[Sequence[int]] | None, "Run of token ids that does not come."]
    skip_special_tokens: Annotated[bool | None, "Leave special tokens out of the text; default true."]
    ignore_eos: Annotated[bool | None, "Go on after the end-of-sequence token; default false."]
    n: Annotated[int | None, "Number of answers; default 1."]
    logprobs: Annotated[int | None, "Logprobs of the token and of this many likeliest ones; default off."]
    logprob_token_ids: Annotated[
        Sequence[int] | None, "Token id whose logprob is told, in place of the likeliest ones'; needs logprobs."
    ]
    prompt_logprobs: Annotated[int | None, "The same of the prompt's tokens behind the first; default off."]
    seed: Annotated[int | None, "Makes a sampled answer repeatable; default: drawn by the server."]
    include_stop_str_in_output: Annotated[bool | None, "Keep the stop string in the text; default false."]
    logit_bias: Annotated[Mapping[int, float] | None, "Added to the logit of a token id."]
    json_schema: Annotated[str | Mapping[str, Any] | None, "JSON schema that the answer is made to meet."]
    json_object: Annotated[bool | None, "Make the answer a JSON object; default false."]
    regex: Annotated[str | None, "Regular expression that the whole answer is made to match."]
    grammar: Annotated[str | None, "Grammar, in Lark or GBNF, that the answer is made to keep to."]
    choice: Annotated[Sequence[str] | None, "Text that the answer is made to be, one of those given."]
    disable_any_whitespace: Annotated[bool | None, "No whitespace between the tokens of JSON; default false."]
    whitespace_pattern: Annotated[str | None, "Regular expression of that whitespace; default: up to 40 characters."]
    disable_additional_properties: Annotated[
        bool | None, "Close the schema's objects that name properties; default: as the server does."
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
    """Raises Refused for a value that the wire cannot carry."""
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
    """Raises TypeError for an unknown sampling field, and Refused for a value that the wire cannot carry."""
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
    """Raises Refused for what are no ids."""
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
