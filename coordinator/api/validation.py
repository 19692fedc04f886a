"""Validate requests before any node gets them.

Each refusal names the value, the limit, and the field in its metadata.
"""

import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.text.answers import TextOptions
from coordinator.text.structures import constraint_of
from coordinator.text.tokenizer import TokenLimit
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM, MODEL_NOT_FOUND, NO_PREFILL_WORKER, PROMPT_TOO_LONG
from serving_core.requests import MEAN, SAMPLING_RANGES, Pooling, SamplingParams

BESIDE: Final = "cannot be had with"  # precedes the field that conflicts with the refused field
MAX_ABORTED: Final = 1024
MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_ANSWERS: Final = 128  # OpenAI's
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 256  # or tokens
MAX_CACHE_SALT_CHARS: Final = 256
MAX_CHOICES: Final = 1024
MAX_CONSTRAINT_CHARS: Final = 2**17
MAX_MESSAGES: Final = 1024
MAX_PARTS: Final = 1024  # of one message
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_LOGPROB_TOKEN_IDS: Final = 128  # vLLM's
MAX_BIAS: Final = 100.0
MAX_PROMPT_LOGPROBS: Final = 2**15  # over all tokens of a prompt and all sequences
MAX_TEMPLATE_KWARGS_CHARS: Final = 2**16
WHOLE_VOCABULARY: Final = -1  # as a number of logprobs
MIN_TEMPERATURE: Final = 1e-6  # lower temperatures are greedy
MAX_REQUEST_ID_CHARS: Final = 128
REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_CHARS}}}")

_COUNTS: Final = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "bad_tokens": MAX_BAD_WORDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
}
_CHAT_CHARS: Final = {"tools_json": 2**20, "template_kwargs_json": MAX_TEMPLATE_KWARGS_CHARS}


@dataclass(frozen=True, slots=True)
class Limits:
    """Current limits of the fleet and the model.

    `prefill_pool_tokens` and `decode_pool_tokens` are the KV cache sizes of the largest node that may prefill or
    decode; None without such a node.
    """

    served_model_names: Sequence[str]
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    prefill_pool_tokens: int | None
    decode_pool_tokens: int | None
    own_pool_tokens: int | None = None  # of the largest decode node alone, without distributed KV on other nodes
    adapters: Collection[str] | None = ()  # None: no node has reported its adapters yet
    eos_token_ids: Collection[int] = ()
    min_output_tokens: int = 1  # reserved for the output; 0 when no output is wanted


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A valid request: the inputs of each of its sequences."""

    request_id: str
    prompt: list[int]
    cache_salt: str
    samplings: tuple[SamplingParams, ...]  # one for each sequence; they differ only in seed and logprob_token_ids
    text: TextOptions
    adapter: str = ""  # LoRA adapter; empty: the base model
    pooling: Pooling | None = None  # set when the request only prefills
    endings: tuple[tuple[int, ...], ...] = ()  # of each sequence's prompt, behind `prompt`; empty: none has one
    num_behind: int = 0  # sequences that the same client call begins next, which must be admitted too
    call_number: int = 0  # a live call of this request with a lower number has broken off

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of the prompt and of all endings."""
        return len(self.prompt) + sum(map(len, self.endings))

    @property
    def is_read_whole(self) -> bool:
        """Return whether every prompt token is computed, for prompt logprobs or mean pooling."""
        is_mean = self.pooling is not None and self.pooling.kind == MEAN
        return is_mean or any(each.prompt_logprobs is not None for each in self.samplings)


def check_input(request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    """Raise RequestError for an invalid field of the request; checks all fields that need no tokenized prompt."""
    _check_model(request.model, limits)
    if not REQUEST_ID.fullmatch(request.request_id):
        raise bad("request_id", f"must match {REQUEST_ID.pattern}, not {_quoted(request.request_id)}")
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise bad("cache_salt", f"has {len(request.cache_salt)} characters, the limit is {MAX_CACHE_SALT_CHARS}")
    for name, most in _COUNTS.items():
        check_count(name, len(getattr(request.sampling_params, name)), most)
    _check_constraint(request.sampling_params)
    _check_bad_words(request.sampling_params)
    match request.WhichOneof("input"):
        case "text":
            _check_prompt_is_there("text", len(request.text))
        case "tokenized":
            _check_prompt_is_there("tokenized.input_ids", len(request.tokenized.input_ids))
            if not request.HasField("truncate_prompt_tokens"):
                check_prompt_length(len(request.tokenized.input_ids), limits)
        case "chat":
            check_chat(request.chat)
        case _:
            raise bad("input", "is missing: send text, tokenized or chat")


def check_num_sequences(params: inference_pb2.SamplingParams, num_prompts: int, limit: int) -> int:
    """Return the number of sequences of a client's call: n for each of its `num_prompts` prompts.

    Raises RequestError when it exceeds `limit`, the largest number in flight, since retries would never succeed.
    """
    num_each = _num_sequences(params)
    num = num_prompts * num_each
    if num > limit:
        problem = (
            f"n ({num_each}) for each of {num_prompts} prompts makes {num} sequences, the limit is {limit} in flight"
        )
        raise RequestError(BAD_PARAM, problem, field="n")
    return num


def check_chat(chat: inference_pb2.ChatInput) -> None:
    """Raise RequestError for a chat without messages, above a limit, or with fields that exclude each other."""
    _check_prompt_is_there("chat.messages", len(chat.messages))
    check_count("chat.messages", len(chat.messages), MAX_MESSAGES)
    for index, message in enumerate(chat.messages):
        check_count(f"chat.messages[{index}].content_parts", len(message.content_parts), MAX_PARTS)
        if message.content and message.content_parts:
            raise bad(f"chat.messages[{index}].content", "cannot be had beside content_parts: send one of them")
    for name, most in _CHAT_CHARS.items():
        if (length := len(getattr(chat, name))) > most:
            raise bad(f"chat.{name}", f"has {length} characters, the limit is {most}")
    if chat.add_generation_prompt and chat.continue_final_message:
        raise bad("chat.add_generation_prompt", "must be false where continue_final_message is true")


def plan_request(
    request: inference_pb2.GenerateRequest,
    prompt: list[int],
    limits: Limits,
    defaults: inference_pb2.SamplingParams,
    grammar: str = "",
    spelled: Collection[tuple[int, ...]] = (),
) -> RequestPlan:
    """Check the fields that `check_input` leaves, and return the plan, with defaults for the fields that are not set.

    `prompt` are the token ids of the input. `defaults` are the model's sampling defaults. `grammar` is the compiled
    constraint, and `spelled` are the token sequences of the bad words. Raises RequestError for an
    empty or too long prompt, and for a field that is out of range.
    """
    _check_prompt_is_there("input", len(prompt))
    check_prompt_length(len(prompt), limits)
    check_token_ids("input", prompt, limits)
    params = request.sampling_params
    num_sequences = _num_sequences(params)
    max_tokens = _max_tokens(params, len(prompt), limits, defaults)
    sampling = _sampling(_filled(params, defaults), max_tokens, limits)
    sampling |= {"grammar": grammar, "bad_tokens": _bad_tokens(params, spelled, limits)}
    _check_num_scores(sampling["prompt_logprobs"], len(prompt), num_sequences)
    return RequestPlan(
        request_id=request.request_id,
        prompt=prompt,
        cache_salt=request.cache_salt,
        samplings=tuple(_with_seeds(sampling, params, num_sequences)),
        text=_text_options(params, sampling["min_tokens"]),
        adapter="" if request.model in limits.served_model_names else request.model,
        call_number=request.call_number,
    )


def _check_constraint(params: inference_pb2.SamplingParams) -> None:
    """Check the constraint before it is compiled."""
    kind = constraint_of(params)
    if kind is None:
        return
    for name in ("ignore_eos", "min_tokens"):
        if getattr(params, name):
            raise bad(name, f"{BESIDE} {kind}, which says where the output ends")
    if params.allowed_token_ids:
        raise bad("allowed_token_ids", f"{BESIDE} {kind}, which says what may come")
    num_chars = len(params.whitespace_pattern)
    if kind == "choice":
        check_count("choice", len(params.choice.choices), MAX_CHOICES)
        if not all(params.choice.choices) or not params.choice.choices:
            raise bad("choice", "must be a list of texts that are not empty")
        num_chars += sum(map(len, params.choice.choices))
    elif kind != "json_object":
        num_chars += len(getattr(params, kind))
    if num_chars > MAX_CONSTRAINT_CHARS:
        raise bad(kind, f"has {num_chars} characters, the limit is {MAX_CONSTRAINT_CHARS}")


def prompt_limit(limits: Limits, num_answer_tokens: int | None = None) -> TokenLimit:
    """Return the limit of a prompt's length that leaves room for `num_answer_tokens` (None: limits.min_output_tokens).

    The prompt must also fit into the KV cache of the largest prefill node. The limit makes the error for a longer
    prompt.
    """
    if num_answer_tokens is None:
        num_answer_tokens = limits.min_output_tokens
    limit, _ = _context(limits)
    room, pool = limit - num_answer_tokens, limits.prefill_pool_tokens
    most = room if pool is None else min(room, pool)
    return TokenLimit(most, lambda fewest: _too_long(fewest, limits, "at least "))


def _check_model(name: str, limits: Limits) -> None:
    if not name or name in limits.served_model_names:
        return
    if limits.adapters is None:
        raise RequestError(NO_PREFILL_WORKER, "no node has come yet that could tell whether there is such a model")
    if name not in limits.adapters:
        message = f"there is no model {_quoted(name)}; {limits.served_model_names[0]!r} is served"
        raise RequestError(MODEL_NOT_FOUND, message, field="model")


def check_count(field: str, count: int, limit: int) -> None:
    """Raise RequestError, naming `field`, when a list has more than `limit` entries."""
    if count > limit:
        raise bad(field, f"has {count} entries, the limit is {limit}")


def check_number(name: str, value: float) -> None:
    """Raise RequestError when a sampling parameter is NaN or outside its range in SAMPLING_RANGES.

    `name` is a temperature, probability or penalty.
    """
    low, high = SAMPLING_RANGES[name]
    if not low <= value <= high:  # refuses NaN too
        raise bad(name, f"must be within [{low:g}, {high:g}], not {value:g}")


def _check_bad_words(params: inference_pb2.SamplingParams) -> None:
    """Check the bad words before they are tokenized."""
    other = constraint_of(params) or ("allowed_token_ids" if params.allowed_token_ids else None)
    for name, what, lengths in (
        ("bad_words", "characters", [len(word) for word in params.bad_words]),
        ("bad_tokens", "tokens", [len(run.input_ids) for run in params.bad_tokens]),
    ):
        if lengths and other is not None:
            raise bad(name, f"{BESIDE} {other}, which says what may come")
        for length in lengths:
            if not 1 <= length <= MAX_BAD_WORD_CHARS:
                raise bad(name, f"must have 1 to {MAX_BAD_WORD_CHARS} {what} each, not {length}")


def _bad_tokens(
    params: inference_pb2.SamplingParams, spelled: Collection[tuple[int, ...]], limits: Limits
) -> tuple[tuple[int, ...], ...]:
    for run in params.bad_tokens:
        check_token_ids("bad_tokens", run.input_ids, limits)
    runs = tuple(dict.fromkeys([*(tuple(run.input_ids) for run in params.bad_tokens), *spelled]))
    ends = {*limits.eos_token_ids, *params.stop_token_ids}
    if runs and len(ends | {run[-1] for run in runs}) >= limits.vocab_size:
        raise bad("bad_words" if params.bad_words else "bad_tokens", "leave no token that may come")
    return runs


def _filled(
    params: inference_pb2.SamplingParams, defaults: inference_pb2.SamplingParams
) -> inference_pb2.SamplingParams:
    filled = inference_pb2.SamplingParams()
    filled.CopyFrom(defaults)
    filled.MergeFrom(params)
    return filled


def _sampling(params: inference_pb2.SamplingParams, max_tokens: int, limits: Limits) -> dict[str, Any]:
    check_token_ids("stop_token_ids", params.stop_token_ids, limits)
    top_k = _integer(params, "top_k", 0, -1, 2**31 - 1)
    min_tokens = _integer(params, "min_tokens", 0, 0, max_tokens)
    sampling = {name: _number(params, name) for name in SAMPLING_RANGES if params.HasField(name)}
    if sampling.get("temperature", MIN_TEMPERATURE) < MIN_TEMPERATURE:
        sampling["temperature"] = 0.0
    return sampling | {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "top_k": top_k if 0 < top_k < limits.vocab_size else 0,
        "logit_bias": _logit_bias(params, limits),
        "allowed_token_ids": _allowed_token_ids(params, min_tokens, limits),
        "stop_token_ids": tuple(dict.fromkeys(params.stop_token_ids)),
        "ignore_eos": params.ignore_eos,
        "logprobs": _num_logprobs(params, "logprobs", limits),
        "logprob_token_ids": _logprob_token_ids(params, limits),
        "prompt_logprobs": _num_logprobs(params, "prompt_logprobs", limits),
    }


def _num_logprobs(params: inference_pb2.SamplingParams, name: str, limits: Limits) -> int | None:
    if not params.HasField(name):
        return None
    most = min(limits.max_logprobs, limits.vocab_size)
    if getattr(params, name) != WHOLE_VOCABULARY:
        return _integer(params, name, 0, 0, most)
    if limits.vocab_size > most:
        raise bad(name, f"({WHOLE_VOCABULARY}) are those of {limits.vocab_size} tokens, the limit is {most}")
    return limits.vocab_size


def _logprob_token_ids(params: inference_pb2.SamplingParams, limits: Limits) -> tuple[int, ...]:
    check_token_ids("logprob_token_ids", params.logprob_token_ids, limits)
    if params.logprob_token_ids and not params.HasField("logprobs"):
        raise bad("logprob_token_ids", "needs logprobs")
    return tuple(dict.fromkeys(params.logprob_token_ids))


def _check_num_scores(num_top: int | None, num_tokens: int, num_sequences: int) -> None:
    """Raise RequestError when the prompt logprobs would not fit into messages."""
    if num_top is None:
        return
    num_scores = num_tokens * (1 + num_top) * num_sequences
    if num_scores > MAX_PROMPT_LOGPROBS:
        raise bad(
            "prompt_logprobs",
            f"({num_top}) of {num_tokens} tokens in {num_sequences} sequences are {num_scores} logprobs, the limit is "
            f"{MAX_PROMPT_LOGPROBS}",
        )


def _with_seeds(
    sampling: dict[str, Any], params: inference_pb2.SamplingParams, num_sequences: int
) -> list[SamplingParams]:
    seed = params.seed if params.HasField("seed") else secrets.randbits(63)
    return [SamplingParams(**sampling, seed=each) for each in sequence_seeds(seed, num_sequences)]


def sequence_seeds(seed: int, num_sequences: int) -> list[int]:
    """Return the seed of each sequence: `seed`, `seed` + 1 and so on, wrapped into 64 signed bits."""
    return [(seed + index + 2**63) % 2**64 - 2**63 for index in range(num_sequences)]  # within an int64


def _text_options(params: inference_pb2.SamplingParams, min_tokens: int) -> TextOptions:
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise bad("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
    return TextOptions(
        stop=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=skips_special_tokens(params),
        min_tokens=min_tokens,
    )


def skips_special_tokens(params: inference_pb2.SamplingParams) -> bool:
    """Return whether special tokens are left out of the text; True by default."""
    return params.skip_special_tokens if params.HasField("skip_special_tokens") else True


def _allowed_token_ids(params: inference_pb2.SamplingParams, min_tokens: int, limits: Limits) -> tuple[int, ...]:
    check_token_ids("allowed_token_ids", params.allowed_token_ids, limits)
    ends = {*limits.eos_token_ids, *params.stop_token_ids}
    if min_tokens and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
        raise bad("allowed_token_ids", f"are all end tokens, which may not come before min_tokens ({min_tokens})")
    return tuple(dict.fromkeys(params.allowed_token_ids))


def _logit_bias(params: inference_pb2.SamplingParams, limits: Limits) -> tuple[tuple[int, float], ...]:
    check_token_ids("logit_bias", params.logit_bias, limits)
    for bias in params.logit_bias.values():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise bad("logit_bias", f"values must be within [{-MAX_BIAS:g}, {MAX_BIAS:g}], not {bias:g}")
    return tuple(sorted(params.logit_bias.items()))


def _max_tokens(
    params: inference_pb2.SamplingParams,
    num_prompt_tokens: int,
    limits: Limits,
    defaults: inference_pb2.SamplingParams,
) -> int:
    """Return the largest number of output tokens.

    A default is lowered to the free part of one pool, if the prompt leaves any, and raised to min_tokens. A value set
    by the client is not changed.
    """
    limit, what = _context(limits)
    room = limit - num_prompt_tokens
    if not params.HasField("max_tokens"):
        own = limits.own_pool_tokens
        if own is not None and num_prompt_tokens + params.min_tokens < own:
            room = min(room, own - num_prompt_tokens)
        return min(room, max(defaults.max_tokens, params.min_tokens)) if defaults.HasField("max_tokens") else room
    if params.max_tokens < limits.min_output_tokens:
        raise bad("max_tokens", f"must be at least {limits.min_output_tokens}, not {params.max_tokens}")
    if params.max_tokens > room:
        message = (
            f"max_tokens ({params.max_tokens}) and the prompt ({num_prompt_tokens} tokens) make "
            f"{params.max_tokens + num_prompt_tokens} tokens, over {what} ({limit})"
        )
        raise RequestError(PROMPT_TOO_LONG, message, field="max_tokens")
    return params.max_tokens


def _context(limits: Limits) -> tuple[int, str]:
    """Return the largest number of prompt and output tokens, and the name of this limit."""
    known = [(limits.max_model_len, "max_model_len")]
    if limits.decode_pool_tokens is not None:
        known.append((limits.decode_pool_tokens, "the KV cache of the largest decode node"))
    return min(known)


def check_prompt_length(num_tokens: int, limits: Limits) -> None:
    """Raise RequestError for a prompt that leaves no room for output, or that no node can prefill."""
    if num_tokens > prompt_limit(limits).most:
        raise _too_long(num_tokens, limits)


def _too_long(num_tokens: int, limits: Limits, at_least: str = "") -> RequestError:
    limit, what = _context(limits)
    has = f"the prompt has {at_least}{num_tokens} tokens"
    if num_tokens > limit - limits.min_output_tokens:
        over = f"over {what} ({limit})"
        message = f"{has}; with one output token that is {over}" if limits.min_output_tokens else f"{has}, {over}"
    else:
        message = f"{has}, over the KV cache of the largest prefill node ({limits.prefill_pool_tokens})"
    return RequestError(PROMPT_TOO_LONG, message, field="input")


def _check_prompt_is_there(field: str, length: int) -> None:
    if length == 0:
        raise bad(field, "is empty: a prompt needs at least one token")


def check_token_ids(field: str, token_ids: Any, limits: Limits) -> None:
    """Raise RequestError for a token id outside the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise bad(field, f"has token id {largest}; the vocabulary ends at {limits.vocab_size - 1}")


def _number(params: inference_pb2.SamplingParams, name: str) -> float:
    value: float = getattr(params, name)
    check_number(name, value)
    return value


def _integer(params: inference_pb2.SamplingParams, name: str, default: int, low: int, high: int) -> int:
    value: int = getattr(params, name) if params.HasField(name) else default
    if not low <= value <= high:
        raise bad(name, f"must be within [{low}, {high}], not {value}")
    return value


def _num_sequences(params: inference_pb2.SamplingParams) -> int:
    return _integer(params, "n", 1, 1, MAX_ANSWERS)


def bad(field: str, problem: str) -> RequestError:
    """Return the RequestError for an invalid value of a field; its message is the field's name and `problem`."""
    return RequestError(BAD_PARAM, f"{field} {problem}", field=field)


def _quoted(text: str) -> str:
    return repr(text[:80])
