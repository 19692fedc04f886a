"""What an installation may lack: the base one is the coordinator and the clients, the rest are the package's extras."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from serving_core.errors import SettingsError

# Of each extra in pyproject.toml that is not for developers alone: what it brings, by the names of imports.
MODULES: Final = {
    "node": ("torch", "gguf", "numpy", "safetensors", "xxhash", "zmq"),
    "bench": ("matplotlib",),
    "otel": ("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.sdk"),
    "transformers": ("transformers",),
    "ray": ("ray",),
}

TRITON: Final = "triton"  # which torch for CUDA brings

P = ParamSpec("P")
R = TypeVar("R")


class MissingExtra(SettingsError):
    """An extra of the package is not installed."""


def require(*extras: str) -> None:
    """Raises MissingExtra, which says how to get them, unless these extras are installed. Imports nothing."""
    for module in (module for extra in extras for module in MODULES[extra]):
        if not is_installed(module):
            raise MissingExtra(
                f"this needs {module}, which is not installed: pip install 'splitserve[{','.join(extras)}]'"
            )


def is_installed(module: str) -> bool:
    """Whether it can be imported. Imports nothing but the packages that it is in."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of those
        return False


def needs(*extras: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function check first that these extras are installed."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            require(*extras)
            return function(*args, **kwargs)

        return checked

    return decorate
