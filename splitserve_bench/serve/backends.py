"""How requests travel: what every backend of a load can do, and which there are."""

from typing import Protocol

from serving_core.errors import SettingsError
from splitserve_bench.serve.reply import Reply
from splitserve_bench.serve.target import BACKENDS, OPENAI, SPLITSERVE, Target
from splitserve_bench.serve.wire import OrderedRequest


class Backend(Protocol):
    """A client of one server. Made, used and closed within one running event loop."""

    def prepare(self, request: OrderedRequest) -> bytes:
        """The request as it goes over the wire, made before the load starts."""
        ...

    async def warm_up(self, num_connections: int, deadline_s: float) -> None:
        """Makes the connections. Raises BenchError when the server does not answer."""
        ...

    async def answer(self, body: bytes, reply: Reply, timeout_s: float) -> None:
        """Sends a prepared request and tells `reply` what comes.

        Raises RequestFailed when the answer is not complete; TimeoutError or RequestFailed when it is not within
        timeout_s. Cancelling ends the request on the server too.
        """
        ...

    async def close(self) -> None: ...


def open_backend(target: Target) -> Backend:
    """Raises SettingsError for a backend that does not exist."""
    if target.backend == SPLITSERVE:
        from splitserve_bench.serve.grpc_backend import GrpcBackend

        return GrpcBackend(target)
    if target.backend == OPENAI:
        from splitserve_bench.serve.openai_backend import OpenAIBackend

        return OpenAIBackend(target)
    raise SettingsError(f"{target.backend!r} is no backend: there are {', '.join(BACKENDS)}")
