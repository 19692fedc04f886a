"""Serve token ids in and out, in vLLM's shape, and render other calls as such requests. Performs no I/O.

An external coordinator renders a call here or elsewhere, and sends what comes of it to /inference/v1/generate.
"""

from collections.abc import Sequence
from typing import Any, Final

from coordinator.api.http.errors import renamed
from coordinator.api.http.logprobs import chat_logprobs, finite_logprob, prompt_logprobs
from coordinator.api.http.request_models import TokensRequest
from coordinator.api.http.requests import OUTPUTS_NAMES, ParsedRequest, sampling_params
from coordinator.api.http.responses import ChoiceFormatter, Envelope, Output, Usage
from coordinator.api.prompts import Terms
from coordinator.api.validation import RequestPlan, bad
from coordinator.control.instructions import Chunk
from coordinator.text.answer_format import PLAIN, AnswerFormat
from coordinator.text.constraints import NO_LEEWAY, Leeway
from coordinator.text.structures import constraint_of
from protos.inference_pb2 import Complete, GenerateRequest, SamplingParams, TokenizedInput, TokenLogprobs
from serving_core.errors import RequestError

TOKENS: Final = "tokens"  # an output mode
TOKENS_PATH: Final = "/inference/v1/generate"
_NESTED: Final = "sampling_params"
_NAMES: Final = {"tokenized.input_ids": "token_ids", "input": "token_ids"} | {
    name: f"{_NESTED}.{OUTPUTS_NAMES.get(name, name)}"
    for name in ("structured_outputs", *(field.name for field in SamplingParams.DESCRIPTOR.fields))
}


def parse_tokens(request: TokensRequest, request_id: str, answer_format: AnswerFormat = PLAIN) -> ParsedRequest:
    """Convert a call of /inference/v1/generate. Raises RequestError."""
    sampling, options = request.sampling_params, request.stream_options
    stream, is_scored = request.stream or False, sampling.prompt_logprobs is not None
    if stream and is_scored:
        raise bad(f"{_NESTED}.prompt_logprobs", "is not supported in a stream")
    if options is not None and not stream:
        raise bad("stream_options", "needs stream: true")
    try:
        params = sampling_params(sampling)
    except RequestError as error:
        raise renamed(error, _NAMES) from error
    for name in ("max_tokens", "logprobs"):
        if (value := getattr(sampling, name)) is not None:
            setattr(params, name, value)
    asked = GenerateRequest(
        request_id=request_id,
        model=request.model or "",
        cache_salt=request.cache_salt or "",
        sampling_params=params,
        tokenized=TokenizedInput(input_ids=request.token_ids),
    )
    includes_usage = bool(options and options.include_usage)
    return ParsedRequest(
        requests=(asked,),
        names=_NAMES,
        num_sequences=sampling.n or 1,
        stream=stream,
        include_usage=includes_usage,
        continuous_usage=includes_usage and bool(options and options.continuous_usage_stats),
        return_token_ids=request.return_token_ids or False,
        is_scored=is_scored,
        output_mode=request.output_mode or TOKENS,
        terms=Terms(leeway=_leeway(answer_format) if not request.reasoning_ended else NO_LEEWAY),
    )


def _leeway(answer_format: AnswerFormat) -> Leeway:
    """Return the leeway of a chat without tools."""
    return Leeway(answer_format.thinks, answer_format.reasoning, answer_format.calls)


class TokensFormatter(ChoiceFormatter):
    """Format of /inference/v1/generate: token ids, and the text too if requested."""

    id_prefix = ""

    def envelope(self, request_id: str, model: str) -> Envelope:
        return TokensEnvelope(self, request_id, model)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return a choice for the event with the prompt's token ids, if they are requested."""
        return self.text_choice(index, "") if self.parsed.return_token_ids and index == 0 else None

    def pieces(self, index: int, prompt: list[int], chunk: Chunk) -> list[dict[str, Any] | str]:
        if not (chunk.token_ids or self._has_text):
            return []  # text that was held back
        return [{**self._choice(index, list(chunk.token_ids), chunk.text, chunk.logprobs), **_OPEN}]

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {**self._choice(index, [], text, []), **_OPEN}

    def closing(self, index: int, complete: Complete) -> list[dict[str, Any]]:
        return [{**self._choice(index, [], "", []), **self.end_of(complete)}]

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        assert output.complete is not None, "the output has not ended"
        choice = self._choice(index, output.token_ids, output.text, output.logprobs)
        return {**choice, **self.end_of(output.complete)}

    def envelope_extras(self, prompt: list[int]) -> dict[str, Any]:
        return self.prompt_token_ids(prompt)

    def envelope_scores(self, scores: list[TokenLogprobs]) -> dict[str, Any]:
        told = prompt_logprobs(scores, self._tokenizer.token_bytes) if self.parsed.is_scored else None
        return {"prompt_logprobs": told}

    @property
    def _has_text(self) -> bool:
        return self.parsed.output_mode != TOKENS

    def _choice(self, index: int, token_ids: list[int], text: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not self._has_text:
            return {"index": index, "logprobs": tokens_logprobs(logprobs), "token_ids": token_ids}
        tells_sampled = bool(self._params.logprob_token_ids)
        told = chat_logprobs(logprobs, self._names, tells_sampled=tells_sampled) if logprobs else None
        return {"index": index, "text": text, "logprobs": told, "token_ids": token_ids}


_OPEN: Final = {"finish_reason": None, "stop_reason": None}


class TokensEnvelope(Envelope):
    """Fields around the choices of /inference/v1/generate."""

    def event(self, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        return {**self._about, "choices": choices, **others}

    def whole(self, choices: list[dict[str, Any]], usage: Usage, **others: Any) -> dict[str, Any]:
        same = {name: self._same[name] for name in ("model", "created")}
        return {**self._about, **same, "choices": choices, **self._tier, "usage": usage.to_json(), **others}

    @property
    def _about(self) -> dict[str, Any]:
        return {"request_id": self._same["id"], "output_mode": self._formatter.parsed.output_mode}


def tokens_logprobs(items: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """Return logprobs by token id: of each sampled token, and of the most likely ones, the sampled one first.

    The rank of a sampled token outside the most likely ones is unknown.
    """
    if not items:
        return None
    content = []
    for item in items:
        top: list[dict[str, Any]] = [
            {"token_id": each.token_id, "logprob": finite_logprob(each), "rank": rank}
            for rank, each in enumerate(item.top, start=1)
        ]
        sampled = [each for each in top if each["token_id"] == item.token_id]
        own = sampled or [{"token_id": item.token_id, "logprob": finite_logprob(item), "rank": None}]
        others = [each for each in top if each["token_id"] != item.token_id]
        content.append({**own[0], "top_logprobs": own + others})
    return {"content": content}


# ---- Rendering: what a call of another endpoint sends to the model ----


def check_renders(parsed: ParsedRequest) -> None:
    """Raise RequestError for a call with tools whose output has to have a form: TokensRequest has no field for it."""
    if parsed.offer is not None and constraint_of(parsed.requests[0].sampling_params) is not None:
        raise bad("tools", "cannot be rendered where the output has to be calls, or has a form of its own beside them")


def tokens_call(asked: GenerateRequest, plan: RequestPlan, parsed: ParsedRequest, text: str) -> dict[str, Any]:
    """Return the call of /inference/v1/generate that generates what `asked` does, and the text of its prompt."""
    params = asked.sampling_params
    kind = constraint_of(params)
    options = {"include_usage": parsed.include_usage, "continuous_usage_stats": parsed.continuous_usage}
    limits = {name: getattr(asked, name) for name in ("ttft_ms", "tpot_ms", "priority") if asked.HasField(name)}
    return {
        "request_id": asked.request_id,
        "model": asked.model or None,
        "token_ids": plan.prompt,
        "prompt_text": text,
        "sampling_params": _rendered_sampling(params, plan) | _rendered_constraint(params, kind),
        "reasoning_ended": True if kind is not None and parsed.terms.leeway == NO_LEEWAY else None,
        "stream": parsed.stream,
        "stream_options": options if parsed.stream else None,
        "cache_salt": asked.cache_salt or None,
        "slo_class": asked.slo_class or None,
        **limits,
    }


_NUMBERS: Final = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "ignore_eos"),
)
_LISTS: Final = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
_TEXT_FIELDS: Final = ("skip_special_tokens", "include_stop_str_in_output")


def _rendered_sampling(params: SamplingParams, plan: RequestPlan) -> dict[str, Any]:
    """Return the parameters in force, defaults included; a seed only if the client has chosen one."""
    sampling = plan.samplings[0]
    told: dict[str, Any] = {"n": len(plan.samplings)} | {name: getattr(sampling, name) for name in _NUMBERS}
    told |= {name: getattr(plan.text, name) for name in _TEXT_FIELDS}
    told |= {name: list(getattr(sampling, name)) for name in _LISTS if getattr(sampling, name)}
    told |= {name: list(getattr(params, name)) for name in ("stop", "bad_words") if getattr(params, name)}
    told |= {name: getattr(params, name) for name in ("seed", "logprobs", "prompt_logprobs") if params.HasField(name)}
    return told | (
        {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias}} if sampling.logit_bias else {}
    )


def _rendered_constraint(params: SamplingParams, kind: str | None) -> dict[str, Any]:
    if kind is None:
        return {}
    match kind:
        case "json_schema":
            told: dict[str, Any] = {"json": params.json_schema}
        case "choice":
            told = {"choice": list(params.choice.choices)}
        case _:
            told = {kind: getattr(params, kind)}
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if params.HasField(name):
            told[name] = getattr(params, name)
    return {"structured_outputs": told}
