"""Why an answer stopped where the model itself had not ended it, in a sentence for a terminal. Pure."""

from splitserve.answers import Completion, ModelInfo


def why_stopped(completion: Completion, model: ModelInfo, max_tokens: int) -> str | None:
    """None for an answer that the model ended. `max_tokens` is the limit that was asked for, or stood in for one."""
    match completion.finish_reason:
        case "stop":
            return _why_at_stop(completion.matched_stop, model)
        case "length":
            return f"The answer is cut off after {_tokens(completion.completion_tokens)}: " + _why_at_length(
                completion, model, max_tokens
            )
        case _:
            return f"The answer was ended after {_tokens(completion.completion_tokens)}: its request was aborted."


def _why_at_stop(matched: str | int | None, model: ModelInfo) -> str | None:
    if isinstance(matched, str):
        return f"Stopped at the stop string {matched!r} (--stop)."
    if matched is not None and matched not in model.eos_token_ids:
        return f"Stopped at token {matched} (--stop-token-ids)."
    return None


def _why_at_length(completion: Completion, model: ModelInfo, max_tokens: int) -> str:
    if completion.completion_tokens in (max_tokens, model.default_sampling_params.get("max_tokens")):
        return "--max-tokens raises this limit."
    num_tokens = completion.prompt_tokens + completion.completion_tokens
    if num_tokens >= model.max_model_len:
        return (
            f"with the prompt's {_tokens(completion.prompt_tokens)} it fills the context of {model.max_model_len} "
            "(--max-model-len of the server)."
        )
    return (
        f"with the prompt's {_tokens(completion.prompt_tokens)} it fills the KV cache of the server's nodes "
        "(their --kv-cache-memory-bytes)."
    )


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
