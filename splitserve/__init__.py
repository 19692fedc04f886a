"""SplitServe: one language model served by prefill nodes and decode nodes.

    with Client("localhost:50051") as client:
        for chunk in client.generate("The capital of France is", max_tokens=32, temperature=0):
            print(chunk.text, end="")

What the calls return is in `splitserve.answers`, what they raise in `splitserve.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.client import answers, errors
    from splitserve.client.clients import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "answers", "errors"]


def __getattr__(name: str) -> Any:
    """Imports the client on first use: the command line's help does without gRPC."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("answers", "errors"):
        return import_module(f"splitserve.client.{name}")
    return getattr(import_module("splitserve.client.clients"), name)
