"""Check which optional packages are installed: the base installation has the coordinator and the clients, the package's
extras the rest.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from serving_core.errors import SettingsError

# Modules that each extra of pyproject.toml brings, except for extras only for developers.
MODULES: Final = {
    "node": ("torch", "gguf", "numpy", "safetensors", "xxhash", "zmq"),
    "bench": ("matplotlib",),
    "otel": ("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.sdk"),
    "transformers": ("transformers",),
    "ray": ("ray",),
}

TRITON: Final = "triton"  # part of torch for CUDA

P = ParamSpec("P")
R = TypeVar("R")


class MissingExtra(SettingsError):
    """An extra of the package is not installed."""


def require(*extras: str) -> None:
    """Raise MissingExtra, which tells how to install them, unless these extras are installed. Imports nothing."""
    for module in (module for extra in extras for module in MODULES[extra]):
        if not is_installed(module):
            raise MissingExtra(
                f"this needs {module}, which is not installed: pip install 'splitserve[{','.join(extras)}]'"
            )


def is_installed(module: str) -> bool:
    """Return whether a module can be imported. Imports only its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def needs(*extras: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to check first that these extras are installed."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            require(*extras)
            return function(*args, **kwargs)

        return checked

    return decorate
