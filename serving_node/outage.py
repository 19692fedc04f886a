"""Why a node is not attached to its coordinator, in words for whoever started it. Pure."""

from typing import Final

import grpc

from serving_core.channels import why_no_handshake

LOST_STATUS: Final = "Internal error from Core"  # gRPC's, where it writes while the other end hangs up

SILENCE: Final = "nothing answers there"
# What gRPC's words for a connection that did not come about hold, and what it means; the first that fits counts.
_MEANINGS: Final = (
    ("Too many open files", "this process has no descriptor left (ulimit -n)"),
    ("errors resolving", "that is not an address that can be resolved"),
    ("Connection refused", "nothing listens there"),
    ("http1.x server", "an HTTP port answers there, not a gRPC one"),
    ("Failed parsing HTTP/2", "what listens there does not speak gRPC"),
    ("timeout", SILENCE),
)


def why_not_attached(error: Exception, address: str, *, over_tls: bool) -> str:
    """What keeps a node from the coordinator at `address`, or has parted it from it."""
    if isinstance(error, grpc.aio.AioRpcError):
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return _not_there(address, "a gRPC port answers that is not the fleet's, such as the public one")
        if details.startswith(("failed to connect", "errors resolving")):
            what = next((what for words, what in _MEANINGS if words in details), None)
            if what is None and (what := why_no_handshake(details, over_tls=over_tls)) and over_tls:
                return f"no TLS with a coordinator at {address}: {what}"
            return _not_there(address, what or details)
        if details == LOST_STATUS:
            return "the coordinator ended the stream"
        return f"no stream to the coordinator: {code.name}: {details}"
    if isinstance(error, TimeoutError):
        return _not_there(address, SILENCE)
    return str(error) or type(error).__name__


def _not_there(address: str, what: str) -> str:
    return f"no coordinator at {address}: {what}; --coordinator must name its fleet port, by default 50052"
