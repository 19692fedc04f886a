"""The model of a simulation: its next token follows from the one before and its place, so that whoever sees an answer
can tell whether each token is there once, in order, and of the right request."""

from functools import lru_cache

from serving_core.requests import SampledToken


def next_token_id(last_token_id: int, position: int, vocab_size: int) -> int:
    """What follows the token at `position - 1`."""
    return (31 * last_token_id + 17 * position + 7) % vocab_size


@lru_cache(maxsize=2**16)
def sampled(token_id: int) -> SampledToken:
    """The same object for the same token: a step makes many."""
    return SampledToken(token_id)
