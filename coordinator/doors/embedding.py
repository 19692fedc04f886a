"""What a client may ask of embeddings: checked before any node hears of it. Pure."""

from typing import Final

from coordinator.doors.prompts import WHAT_FITS
from coordinator.doors.validation import AnswerPlan, Limits, bad, check_prompt_length, check_token_ids, prompt_limit
from coordinator.text.answers import TextOptions
from protos.inference_pb2 import EmbedRequest, GenerateRequest
from serving_core.errors import RequestError
from serving_core.model_config import Embedder, ModelConfig
from serving_core.reasons import BAD_PARAM
from serving_core.requests import Pooling, SamplingParams

NO_ANSWERS: Final = "the model makes embeddings, and writes no answers"
NO_EMBEDDINGS: Final = "the model writes answers, and makes no embeddings unless it is served with --runner pooling"


def check_writes(config: ModelConfig) -> None:
    """Raises RequestError where a model makes embeddings alone."""
    if config.embedder is not None:
        raise RequestError(BAD_PARAM, NO_ANSWERS, field="model")


def embedder_of(config: ModelConfig) -> Embedder:
    """Raises RequestError where a model is there to write answers."""
    if config.embedder is None:
        raise RequestError(BAD_PARAM, NO_EMBEDDINGS, field="model")
    return config.embedder


def as_question(request: EmbedRequest) -> GenerateRequest:
    """What a request for an embedding has in common with one for an answer."""
    question = GenerateRequest(request_id=request.request_id, model=request.model, cache_salt=request.cache_salt)
    match request.WhichOneof("input"):
        case "text":
            question.text = request.text
        case "tokenized":
            question.tokenized.CopyFrom(request.tokenized)
    for name in ("priority", "truncate_prompt_tokens"):
        if request.HasField(name):
            setattr(question, name, getattr(request, name))
    return question


def most_kept(request: EmbedRequest, limits: Limits) -> int | None:
    """To how many tokens a longer input is cut; None: it is not."""
    if not request.HasField("truncate_prompt_tokens"):
        return None
    most, room = request.truncate_prompt_tokens, prompt_limit(limits).most
    return room if most == WHAT_FITS else most


def plan_embedding(request: EmbedRequest, prompt: list[int], limits: Limits, config: ModelConfig) -> AnswerPlan:
    """Checks everything that was not checked before, and fills in what the client left open. Raises RequestError."""
    if not prompt:
        raise bad("input", "is empty: an embedding needs at least one token")
    check_prompt_length(len(prompt), limits)
    check_token_ids("input", prompt, limits)
    return AnswerPlan(
        request_id=request.request_id,
        prompt=prompt,
        cache_salt=request.cache_salt,
        samplings=(SamplingParams(max_tokens=0),),
        text=TextOptions(),
        adapter="" if request.model in limits.served_model_names else request.model,
        pooling=pooling_of(request, config),
    )


def pooling_of(request: EmbedRequest, config: ModelConfig) -> Pooling:
    """How the embedding is made that a request asks for. Raises RequestError."""
    embedder = embedder_of(config)
    normalizes = request.normalize if request.HasField("normalize") else embedder.normalizes
    if not request.HasField("dimensions") or request.dimensions == config.hidden_size:
        return Pooling(embedder.kind, normalizes)
    asked = request.dimensions
    if not embedder.may_be_cut:
        why = "its config.json names neither is_matryoshka nor matryoshka_dimensions"
        raise bad("dimensions", f"({asked}) is not supported by the model, which has {config.hidden_size}: {why}")
    if not 1 <= asked <= config.hidden_size:
        raise bad("dimensions", f"must be within [1, {config.hidden_size}], not {asked}")
    if embedder.lengths and asked not in embedder.lengths:
        raise bad("dimensions", f"must be one of {', '.join(map(str, embedder.lengths))}, not {asked}")
    return Pooling(embedder.kind, normalizes, asked)
