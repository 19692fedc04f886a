"""What a request gets whose numbers are not finite: the model overflows at it, or this node is broken."""

from serving_core.errors import RequestError
from serving_core.reasons import STEP_FAILED
from serving_core.requests import NO_TOKEN, SampledToken


def overflowed(what: str) -> SampledToken:
    """In place of its token or embedding: other requests of its step go on, and another node may try it."""
    return SampledToken(NO_TOKEN, error=RequestError(STEP_FAILED, f"the model's {what} are not finite numbers"))
