"""What is meant by a flag that a command does not have: vLLM's names where ours differ, and names of other commands;
and where a wrong value comes from."""

from collections.abc import Mapping
from typing import Final

import click
from click.core import ParameterSource

Hints = Mapping[str, str]
"""Flags, and the sentence that each of them gets."""

_MODEL: Final = dict.fromkeys(("--model", "--model-path"), "MODEL is given without a flag")
_RANKS: Final = ("--tensor-parallel-size", "--tp-size", "--tp", "-t")  # click takes the first letter of -tp for a flag
_STAGES: Final = ("--pipeline-parallel-size", "--pp-size", "--pp")
_MEMORY: Final = "--mem-fraction-static"
_OF_REQUESTS: Final = {
    "--max-tokens": "a request has this limit, such as `splitserve generate --max-tokens`",
    "--temperature": "a request says how it is sampled; --generation-config sets the defaults",
    "--override-generation-config": "a request says how it is sampled; --generation-config sets the defaults",
}
_OF_THE_FOLDER: Final = {
    **_MODEL,
    "--tokenizer": "the tokenizer is that of the model's folder",
    "--trust-remote-code": "code of a model's folder is never run; leave the flag out",
}
_LOGS: Final = dict.fromkeys(
    ("--disable-log-requests", "--disable-log-stats", "--uvicorn-log-level"), "see --log-level"
)
_TRACES: Final = {"--otlp-traces-endpoint": "it is --otlp-endpoint"}

_CHATS: Final = {
    "--enable-auto-tool-choice": "it is always on: see --tool-call-parser",
    "--default-chat-template-kwargs": "it is --chat-template-kwargs",
}
_TLS: Final = {
    "--ssl-certfile": "it is --tls-cert",
    "--ssl-keyfile": "it is --tls-key",
    "--ssl-ca-certs": "it is --tls-ca",
    "--ssl-cert-reqs": "--tls-verify-clients asks clients for certificates",
    "--enable-ssl-refresh": "certificates are always taken anew when their files change",
}

_UP: Final[Hints] = {
    **_OF_THE_FOLDER,
    **_CHATS,
    **_TLS,
    **_OF_REQUESTS,
    **_LOGS,
    **_TRACES,
    **dict.fromkeys(_RANKS, "each role has its own: --prefill-tp and --decode-tp"),
    _MEMORY: "it is --gpu-memory-utilization",
    "--port": "there are two, --grpc-port and --http-port",
    **dict.fromkeys(_STAGES, "each role has its own: --prefill-pp and --decode-pp"),
    "--data-parallel-size": "--prefill and --decode are the numbers of nodes",
    "--num-gpu-blocks-override": "the KV cache of each node has --num-kv-blocks",
    "--enable-chunked-prefill": "prompts are always computed in chunks, of --max-num-batched-tokens",
    "--kv-transfer-config": "--prefill and --decode start both roles, --kv-transport carries the KV between them",
}
_COORDINATOR: Final[Hints] = {
    **_OF_THE_FOLDER,
    **_CHATS,
    **_TLS,
    **_OF_REQUESTS,
    **_LOGS,
    **_TRACES,
    **dict.fromkeys(
        (*_RANKS, _MEMORY, "--gpu-memory-utilization", "--kv-cache-memory-bytes"),
        "nodes have it: `splitserve prefill --help`",
    ),
    "--grpc-port": "it is --port, beside --http-port and --fleet-port",
}
_NODE: Final[Hints] = {
    **_OF_THE_FOLDER,
    **_LOGS,
    "--otlp-traces-endpoint": "the coordinator sends traces: `splitserve coordinator --otlp-endpoint`",
    _MEMORY: "it is --gpu-memory-utilization",
    **dict.fromkeys(("--prefill-tp", "--decode-tp", "--tp-size", "--tp", "-t"), "it is --tensor-parallel-size"),
    **dict.fromkeys(("--host", "--port", "--server"), "a node has no clients; it dials --coordinator HOST:PORT"),
    "--chat-template": "the coordinator renders chats: `splitserve coordinator --help`",
    **dict.fromkeys(("--prefill-pp", "--decode-pp", "--pp-size", "--pp"), "it is --pipeline-parallel-size"),
    "--num-gpu-blocks-override": "the KV cache has --num-kv-blocks",
    "--enable-chunked-prefill": "prompts are always computed in chunks, of --max-num-batched-tokens",
}
_SERVER: Final[Hints] = dict.fromkeys(
    ("--target", "--address", "--url", "--base-url", "--host", "--port", "--coordinator"), "it is --server HOST:PORT"
)
_ASK: Final[Hints] = {
    **_SERVER,
    **dict.fromkeys(("--max-new-tokens", "--max-completion-tokens"), "it is --max-tokens"),
    "--model-name": "it is --model NAME, of an adapter",
    "--stream": "answers are always streamed",
}

HINTS: Final[Mapping[str, Hints]] = {
    "up": _UP,
    "coordinator": _COORDINATOR,
    "prefill": _NODE,
    "decode": _NODE,
    "both": _NODE,
    "generate": {**_ASK, **dict.fromkeys(("--prompt", "--quick", "-q", "-p"), "the prompt is TEXT, or - for stdin")},
    "chat": {**_ASK, "--system-prompt": "it is --system"},
    "status": _SERVER,
    "serve": {
        **dict.fromkeys(("--url", "--address"), "it is --server HOST:PORT or --server http://HOST:PORT"),
        "--input-len": "it is --random-input-len",
        "--output-len": "it is --random-output-len",
        "--concurrency": "it is --max-concurrency",
    },
}
"""By the names of the commands."""


def hinted(error: click.NoSuchOption) -> click.UsageError:
    """The error with a hint in the place of click's guess where there is one."""
    command = error.ctx.command.name if error.ctx is not None else None
    hint = HINTS.get(command or "", {}).get(error.option_name)
    return click.UsageError(f"No such option '{error.option_name}': {hint}.", error.ctx) if hint else error


def with_source(error: click.BadParameter) -> click.BadParameter:
    """The error with where the value comes from, if not from the command line."""
    if error.ctx is None or error.param is None or error.param.name is None:
        return error
    match error.ctx.get_parameter_source(error.param.name):
        case ParameterSource.ENVIRONMENT:
            source = f"environment variable {error.param.envvar}"
        case ParameterSource.DEFAULT_MAP:
            source = "--config"
        case _:
            return error
    return click.BadParameter(f"{error.message} ({source})", error.ctx, error.param)
