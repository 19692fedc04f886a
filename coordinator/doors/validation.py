"""What a client may ask for. Everything is checked here, before any node hears of a request.

Each refusal names the limit and the value, and the field in its metadata.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from coordinator.text.answers import TextOptions
from coordinator.text.tokenizer import TokenLimit
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM, MODEL_NOT_FOUND, PROMPT_TOO_LONG
from serving_core.requests import SamplingParams

MAX_ABORTED: Final = 1024
MAX_ANSWERS: Final = 16
MAX_CACHE_SALT_CHARS: Final = 256
MAX_MESSAGES: Final = 1024
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_BIAS: Final = 100.0
MIN_TEMPERATURE: Final = 1e-6
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_COUNTS: Final = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "logit_bias": MAX_LOGIT_BIAS}
_RANGES: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What can be served at this moment. A pool is that of the largest node that reads prompts, or writes answers; None
    without any."""

    served_model_name: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    prefill_pool_tokens: int | None
    decode_pool_tokens: int | None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """A valid request: what each of its answers is made from."""

    request_id: str
    prompt: list[int]
    cache_salt: str
    samplings: tuple[SamplingParams, ...]  # one for each answer, different in the seed alone
    text: TextOptions


def check_input(request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    """Checks what can be told before the prompt is tokenized. Raises RequestError."""
    if request.model not in ("", limits.served_model_name):
        message = f"there is no model {_quoted(request.model)}; {limits.served_model_name!r} is served"
        raise RequestError(MODEL_NOT_FOUND, message, field="model")
    if not REQUEST_ID.fullmatch(request.request_id):
        raise _bad("request_id", f"must match {REQUEST_ID.pattern}, not {_quoted(request.request_id)}")
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise _bad("cache_salt", f"has {len(request.cache_salt)} characters, the limit is {MAX_CACHE_SALT_CHARS}")
    for name, most in _COUNTS.items():
        check_count(name, len(getattr(request.sampling_params, name)), most)
    match request.WhichOneof("input"):
        case "text":
            _check_prompt_is_there("text", len(request.text))
        case "tokenized":
            _check_prompt_is_there("tokenized.input_ids", len(request.tokenized.input_ids))
            _check_prompt_length(len(request.tokenized.input_ids), limits)
        case "chat":
            _check_prompt_is_there("chat.messages", len(request.chat.messages))
            check_count("chat.messages", len(request.chat.messages), MAX_MESSAGES)
        case _:
            raise _bad("input", "is missing: send text, tokenized or chat")


def plan_answers(
    request: inference_pb2.GenerateRequest,
    prompt: list[int],
    limits: Limits,
    defaults: inference_pb2.SamplingParams,
) -> AnswerPlan:
    """Checks everything else and fills in what the client left open, with the defaults where there are some. Raises
    RequestError."""
    _check_prompt_is_there("input", len(prompt))
    _check_prompt_length(len(prompt), limits)
    _check_token_ids("input", prompt, limits)
    params = request.sampling_params
    num_answers = _integer(params, "n", 1, 1, MAX_ANSWERS)
    max_tokens = _max_tokens(params, len(prompt), limits, defaults)
    sampling = _sampling(_filled(params, defaults), max_tokens, limits)
    return AnswerPlan(
        request_id=request.request_id,
        prompt=prompt,
        cache_salt=request.cache_salt,
        samplings=tuple(_with_seeds(sampling, params, num_answers)),
        text=_text_options(params, sampling["min_tokens"]),
    )


def prompt_limit(limits: Limits) -> TokenLimit:
    """How long a prompt may be."""
    limit, _ = _context(limits)
    pool = limits.prefill_pool_tokens
    most = limit - 1 if pool is None else min(limit - 1, pool)
    return TokenLimit(most, lambda fewest: _too_long(fewest, limits, "at least "))


def check_count(field: str, count: int, limit: int) -> None:
    """Raises RequestError for a list that has too many entries, which may then be left unread."""
    if count > limit:
        raise _bad(field, f"has {count} entries, the limit is {limit}")


def check_number(name: str, value: float) -> None:
    """Raises RequestError for a temperature, probability or penalty that is out of range."""
    low, high = _RANGES[name]
    if not low <= value <= high:  # NaN is not
        raise _bad(name, f"must be within [{low:g}, {high:g}], not {value:g}")
    if name == "temperature" and 0 < value < MIN_TEMPERATURE:
        raise _bad(name, f"must be 0 or at least {MIN_TEMPERATURE:g}, not {value:g}")


def _filled(
    params: inference_pb2.SamplingParams, defaults: inference_pb2.SamplingParams
) -> inference_pb2.SamplingParams:
    filled = inference_pb2.SamplingParams()
    filled.CopyFrom(defaults)
    filled.MergeFrom(params)
    return filled


def _sampling(params: inference_pb2.SamplingParams, max_tokens: int, limits: Limits) -> dict[str, Any]:
    _check_token_ids("stop_token_ids", params.stop_token_ids, limits)
    top_k = _integer(params, "top_k", 0, -1, 2**31 - 1)
    sampling = {name: _number(params, name) for name in _RANGES if params.HasField(name)}
    return sampling | {
        "max_tokens": max_tokens,
        "min_tokens": _integer(params, "min_tokens", 0, 0, max_tokens),
        "top_k": top_k if 0 < top_k < limits.vocab_size else 0,
        "logit_bias": _logit_bias(params, limits),
        "stop_token_ids": tuple(dict.fromkeys(params.stop_token_ids)),
        "ignore_eos": params.ignore_eos,
        "logprobs": _integer(params, "logprobs", 0, 0, min(limits.max_logprobs, limits.vocab_size))
        if params.HasField("logprobs")
        else None,
    }


def _with_seeds(
    sampling: dict[str, Any], params: inference_pb2.SamplingParams, num_answers: int
) -> list[SamplingParams]:
    seed = params.seed if params.HasField("seed") else secrets.randbits(63)
    seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(num_answers)]  # stays within an int64
    return [SamplingParams(**sampling, seed=seed) for seed in seeds]


def _text_options(params: inference_pb2.SamplingParams, min_tokens: int) -> TextOptions:
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _bad("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
    return TextOptions(
        stop=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        min_tokens=min_tokens,
    )


def _logit_bias(params: inference_pb2.SamplingParams, limits: Limits) -> tuple[tuple[int, float], ...]:
    _check_token_ids("logit_bias", params.logit_bias, limits)
    for bias in params.logit_bias.values():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _bad("logit_bias", f"values must be within [{-MAX_BIAS:g}, {MAX_BIAS:g}], not {bias:g}")
    return tuple(sorted(params.logit_bias.items()))


def _max_tokens(
    params: inference_pb2.SamplingParams,
    num_prompt_tokens: int,
    limits: Limits,
    defaults: inference_pb2.SamplingParams,
) -> int:
    """A default gives way to what there is room for, and to min_tokens; what the client asks for does not."""
    limit, what = _context(limits)
    room = limit - num_prompt_tokens
    if not params.HasField("max_tokens"):
        return min(room, max(defaults.max_tokens, params.min_tokens)) if defaults.HasField("max_tokens") else room
    if params.max_tokens < 1:
        raise _bad("max_tokens", f"must be at least 1, not {params.max_tokens}")
    if params.max_tokens > room:
        message = (
            f"max_tokens ({params.max_tokens}) and the prompt ({num_prompt_tokens} tokens) make "
            f"{params.max_tokens + num_prompt_tokens} tokens, over {what} ({limit})"
        )
        raise RequestError(PROMPT_TOO_LONG, message, field="max_tokens")
    return params.max_tokens


def _context(limits: Limits) -> tuple[int, str]:
    """The most tokens of prompt and answer, and what sets this limit."""
    known = [(limits.max_model_len, "max_model_len")]
    if limits.decode_pool_tokens is not None:
        known.append((limits.decode_pool_tokens, "the KV cache of the largest decode node"))
    return min(known)


def _check_prompt_length(num_tokens: int, limits: Limits) -> None:
    if num_tokens > prompt_limit(limits).most:
        raise _too_long(num_tokens, limits)


def _too_long(num_tokens: int, limits: Limits, at_least: str = "") -> RequestError:
    limit, what = _context(limits)
    has = f"the prompt has {at_least}{num_tokens} tokens"
    if num_tokens >= limit:
        message = f"{has}; with one token of answer that is over {what} ({limit})"
    else:
        message = f"{has}, over the KV cache of the largest prefill node ({limits.prefill_pool_tokens})"
    return RequestError(PROMPT_TOO_LONG, message, field="input")


def _check_prompt_is_there(field: str, length: int) -> None:
    if length == 0:
        raise _bad(field, "is empty: a prompt needs at least one token")


def _check_token_ids(field: str, token_ids: Any, limits: Limits) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise _bad(field, f"has token id {largest}; the vocabulary ends at {limits.vocab_size - 1}")


def _number(params: inference_pb2.SamplingParams, name: str) -> float:
    value: float = getattr(params, name)
    check_number(name, value)
    return value


def _integer(params: inference_pb2.SamplingParams, name: str, default: int, low: int, high: int) -> int:
    value: int = getattr(params, name) if params.HasField(name) else default
    if not low <= value <= high:
        raise _bad(name, f"must be within [{low}, {high}], not {value}")
    return value


def _bad(field: str, problem: str) -> RequestError:
    return RequestError(BAD_PARAM, f"{field} {problem}", field=field)


def _quoted(text: str) -> str:
    return repr(text[:80])
