"""Check which optional packages are installed: the base installation has the coordinator and the clients, the package's
extras the rest.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from serving_core.errors import SettingsError

# Modules that the base installation brings, as pyproject.toml declares it.
BASE_MODULES: Final = (
    *("anyio", "click", "cryptography", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "hpack", "httptools"),
    *("httpx2", "huggingface_hub", "jinja2", "llguidance", "msgpack", "prometheus_client", "psutil", "pydantic"),
    *("yaml", "rich", "starlette", "tokenizers", "tqdm", "uvicorn", "uvloop"),
)

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
    """Packages of the base installation or of an extra are not installed."""


def require(*extras: str) -> None:
    """Check that the base installation and these extras are installed; import nothing. Raises MissingExtra, which names
    every missing module and the command that installs it.
    """
    needed = [*BASE_MODULES, *(module for extra in extras for module in MODULES[extra])]
    missing = [module for module in needed if not is_installed(module)]
    if not missing:
        return
    what = f"'splitserve[{','.join(extras)}]'" if extras else "splitserve"
    are = "which is" if len(missing) == 1 else "which are"
    raise MissingExtra(f"this needs {', '.join(missing)}, {are} not installed: pip install {what}")


def end_without_base() -> None:
    """End the process with exit code 2 and the message of MissingExtra unless the base installation is complete. A main
    module must call this before it imports other packages.
    """
    try:
        require()
    except MissingExtra as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)


def is_installed(module: str) -> bool:
    """Return whether a module can be imported. Imports only its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def needs(*extras: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator by which a function first checks that these extras are installed, as `require` does."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            require(*extras)
            return function(*args, **kwargs)

        return checked

    return decorate
