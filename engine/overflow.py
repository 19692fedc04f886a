"""Define the result of a request whose numbers are not finite: the model overflows, or this node is broken."""

from serving_core.errors import RequestError
from serving_core.reasons import STEP_FAILED
from serving_core.requests import NO_TOKEN, SampledToken


def overflowed(what: str) -> SampledToken:
    """Return an error instead of a token or embedding: the other requests of the step continue, and another node may
    retry the request.
    """
    return SampledToken(NO_TOKEN, error=RequestError(STEP_FAILED, f"the model's {what} are not finite numbers"))
