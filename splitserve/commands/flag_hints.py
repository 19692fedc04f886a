"""Suggest the right command, flag or value for a wrong one: SplitServe's names for those of vLLM and SGLang."""

from collections.abc import Mapping
from typing import Final

import click
from click.core import ParameterSource

Hints = Mapping[str, str]
"""Hint sentences by flag."""

_MODEL: Final = dict.fromkeys(("--model", "--model-path"), "MODEL is given without a flag")
_RANKS: Final = ("--tensor-parallel-size", "--tp-size", "--tp", "-t")  # click takes the first letter of -tp for a flag
_STAGES: Final = ("--pipeline-parallel-size", "--pp-size", "--pp")
_PORTS: Final = ("--port", "--grpc-port", "--http-port")
_MEMORY: Final = "--mem-fraction-static"
_OF_REQUESTS: Final = {
    "--max-tokens": "a request has this limit, such as `splitserve generate --max-tokens`",
    "--temperature": "a request says how it is sampled; --generation-config sets the defaults",
    "--override-generation-config": "a request says how it is sampled; --generation-config sets the defaults",
}
_OF_THE_FOLDER: Final = {
    **_MODEL,
    **dict.fromkeys(
        ("--tokenizer", "--tokenizer-path", "--tokenizer-mode"), "the tokenizer is that of the model's folder"
    ),
    "--load-format": "whether a model is safetensors or GGUF is known by its files",
    "--revision": "give the folder of that revision as MODEL",
    **dict.fromkeys(("--hf-overrides", "--json-model-override-args"), "config.json of the model's folder says it all"),
    "--trust-remote-code": "code of a model's folder is never run; leave the flag out",
}
_LOGS: Final = dict.fromkeys(
    (
        "--disable-log-requests",
        "--disable-log-stats",
        "--enable-log-requests",
        "--log-requests",
        "--uvicorn-log-level",
        "--log-level-http",
        "--decode-log-interval",
    ),
    "see --log-level",
)
_TRACES: Final = {"--otlp-traces-endpoint": "it is --otlp-endpoint"}

_CONTEXT: Final = dict.fromkeys(("--context-length", "--ctx-size", "--n-ctx"), "it is --max-model-len")

_ENGINE: Final = {
    _MEMORY: "it is --gpu-memory-utilization",
    **_CONTEXT,
    "--page-size": "it is --block-size",
    **dict.fromkeys(("--num-gpu-blocks-override", "--max-total-tokens"), "the KV cache of a node has --num-kv-blocks"),
    "--max-running-requests": "it is --max-num-seqs",
    **dict.fromkeys(("--chunked-prefill-size", "--max-prefill-tokens"), "it is --max-num-batched-tokens"),
    "--enable-chunked-prefill": "prompts are always computed in chunks, of --max-num-batched-tokens",
    "--disable-radix-cache": "it is --no-enable-prefix-caching",
    "--disable-cuda-graph": "it is --enforce-eager",
    "--enable-deterministic-inference": "it is --batch-invariant",
    "--cpu-offload-gb": "of the weights --weights-memory-bytes stay in memory",
    **dict.fromkeys(
        ("--swap-space", "--kv-offloading-size", "--enable-hierarchical-cache", "--hicache-size"),
        "KV that the pool gives up has --kv-host-bytes and --kv-disk-bytes",
    ),
    **dict.fromkeys(("--lora-modules", "--lora-paths"), "an adapter is --lora NAME=FOLDER"),
    **dict.fromkeys(
        ("--enable-lora", "--max-loras", "--max-lora-rank", "--max-loras-per-batch"),
        "every --lora NAME=FOLDER can be asked for",
    ),
    **dict.fromkeys(
        ("--speculative-config", "--speculative-algorithm"), "see --speculation and --num-speculative-tokens"
    ),
    "--speculative-draft-model-path": "it is --speculative-model",
    "--speculative-num-draft-tokens": "it is --num-speculative-tokens",
    **dict.fromkeys(("--seed", "--random-seed"), "a request has its own, such as `splitserve generate --seed`"),
    **dict.fromkeys(("--disaggregation-transfer-backend", "--disaggregation-ib-device"), "it is --kv-transport"),
    **dict.fromkeys(("--task", "--is-embedding"), "it is --runner"),
}
_API_SERVER: Final = {
    **dict.fromkeys(("--tokenizer-worker-num",), "it is --api-server-count"),
    "--max-queued-requests": "it is --max-num-queued-reqs",
    "--enable-metrics": "the HTTP port always has /metrics",
    **dict.fromkeys(
        ("--schedule-policy", "--scheduling-policy"),
        "who is read first is a matter of limits and priorities: see --slo-class",
    ),
    "--watchdog-timeout": "it is --step-timeout-s",
}
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
    **_ENGINE,
    **_API_SERVER,
    **dict.fromkeys(_RANKS, "each role has its own: --prefill-tp and --decode-tp"),
    "--port": "there are two, --grpc-port and --http-port",
    **dict.fromkeys(_STAGES, "each role has its own: --prefill-pp and --decode-pp"),
    **dict.fromkeys(("--data-parallel-size", "--dp-size", "--dp"), "--prefill and --decode are the numbers of nodes"),
    **dict.fromkeys(
        ("--kv-transfer-config", "--disaggregation-mode"),
        "--prefill and --decode start both roles, --kv-transport carries the KV between them",
    ),
    "--distributed-executor-backend": "with --ray the nodes are on a Ray cluster",
}
_COORDINATOR: Final[Hints] = {
    **_OF_THE_FOLDER,
    **_CHATS,
    **_TLS,
    **_OF_REQUESTS,
    **_LOGS,
    **_TRACES,
    **_API_SERVER,
    **_CONTEXT,
    **dict.fromkeys(
        (*_RANKS, _MEMORY, "--gpu-memory-utilization", "--kv-cache-memory-bytes"),
        "nodes have it: `splitserve prefill --help`",
    ),
    "--port": "there are three, --grpc-port, --http-port and --fleet-port",
}
_NODE: Final[Hints] = {
    **_OF_THE_FOLDER,
    **_LOGS,
    **_ENGINE,
    "--otlp-traces-endpoint": "the coordinator sends traces: `splitserve coordinator --otlp-endpoint`",
    **dict.fromkeys(("--prefill-tp", "--decode-tp", "--tp-size", "--tp", "-t"), "it is --tensor-parallel-size"),
    **dict.fromkeys(("--host", "--server", *_PORTS), "a node has no clients; it dials --coordinator HOST:PORT"),
    "--chat-template": "the coordinator renders chats: `splitserve coordinator --help`",
    **dict.fromkeys(("--prefill-pp", "--decode-pp", "--pp-size", "--pp"), "it is --pipeline-parallel-size"),
    "--disaggregation-mode": "each role is a command: `splitserve prefill --help`",
}
_SERVER: Final[Hints] = dict.fromkeys(
    ("--target", "--address", "--url", "--base-url", "--host", "--coordinator", *_PORTS), "it is --server HOST:PORT"
)
_ASK: Final[Hints] = {
    **_SERVER,
    **dict.fromkeys(("--max-new-tokens", "--max-completion-tokens", "--n-predict"), "it is --max-tokens"),
    **dict.fromkeys(("--ctx-size", "--max-model-len"), "the server has it: `splitserve up --max-model-len`"),
    "--model-name": "it is --model NAME, of an adapter",
    "--stream": "outputs are always streamed",
}

HINTS: Final[Mapping[str, Hints]] = {
    "up": _UP,
    "coordinator": _COORDINATOR,
    "prefill": _NODE,
    "decode": _NODE,
    "mixed": _NODE,
    "generate": {**_ASK, **dict.fromkeys(("--prompt", "--quick", "-q", "-p"), "the prompt is TEXT, or - for stdin")},
    "chat": {**_ASK, "--system-prompt": "it is --system"},
    **dict.fromkeys(("status", "top", "role", "drain"), _SERVER),
    "run-batch": {
        **dict.fromkeys(_SERVER, "it is --server http://HOST:PORT"),
        "--model": "the body of each line names its model",
    },
    "serve": {
        **dict.fromkeys(
            ("--url", "--address", "--grpc-port", "--http-port"),
            "it is --server HOST:PORT or --server http://HOST:PORT",
        ),
        "--input-len": "it is --random-input-len",
        "--output-len": "it is --random-output-len",
        "--concurrency": "it is --max-concurrency",
    },
}
"""Hints by command."""

COMMAND_HINTS: Final[Hints] = {
    **dict.fromkeys(("serve", "launch", "launch_server", "run", "start"), "a model is served by `splitserve up MODEL`"),
    "complete": "it is `splitserve generate --raw TEXT`",
    "ask": "it is `splitserve generate TEXT`",
    "ui": "`splitserve up` serves a page at http://localhost:8000/ui",
}

VALUE_HINTS: Final[Mapping[str, Hints]] = {
    "--kv-cache-dtype": dict.fromkeys(("fp8", "fp8_e5m2"), "floats of 8 bits are `fp8_e4m3`"),
    "--dtype": {"half": "it is `float16`", "float": "it is `float32`"},
    "--quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors"),
        "how weights are stored is known by the model's folder, without a flag",
    ),
    "--generation-config": {"vllm": "it is `none`"},
    "--tool-call-parser": {
        "llama": "it is `llama3`",
        **dict.fromkeys(("qwen", "qwen25"), "it is `hermes`"),
        "llama4": "it is `pythonic`",
        "gpt-oss": "it is `openai`",
    },
    "--reasoning-parser": {"deepseek-r1": "it is `deepseek_r1`", "gpt-oss": "it is `openai_gptoss`"},
    "--backend": {
        **dict.fromkeys(("vllm", "sglang", "sglang-oai"), "any server with OpenAI's API is `openai`"),
        "openai-chat": "it is `openai` with --endpoint /v1/chat/completions",
    },
}
"""Hints for values, by flag."""


def hinted(error: click.NoSuchOption) -> click.UsageError:
    """Return a usage error with our hint about the unknown flag instead of click's guess; `error` without a hint."""
    command = error.ctx.command.name if error.ctx is not None else None
    hint = HINTS.get(command or "", {}).get(error.option_name)
    return click.UsageError(f"No such option '{error.option_name}': {hint}.", error.ctx) if hint else error


def hinted_command(error: click.UsageError, name: str) -> click.UsageError:
    """Return a usage error with our hint about the unknown command `name`; `error` if there is no hint."""
    hint = COMMAND_HINTS.get(name)
    return click.UsageError(f"No such command '{name}': {hint}.", error.ctx) if hint else error


def explained(error: click.BadParameter) -> click.BadParameter:
    """Return the error about a wrong value with our hint, if there is one, and the place where the value was set.

    The place is named if it is an environment variable or the --config file.
    """
    if error.ctx is None or error.param is None or error.param.name is None:
        return error
    hint, source = _value_hint(error.param.opts[0], error.message), ""
    match error.ctx.get_parameter_source(error.param.name):
        case ParameterSource.ENVIRONMENT:
            source = f" (environment variable {error.param.envvar})"
        case ParameterSource.DEFAULT_MAP:
            source = " (--config)"
    message = f"{error.message.removesuffix('.')}: {hint}." if hint else error.message
    return click.BadParameter(message + source, error.ctx, error.param)


def _value_hint(flag: str, refusal: str) -> str:
    """Return the hint about a refused value; empty without one."""
    hints = VALUE_HINTS.get(flag, {})
    return next((hint for value, hint in hints.items() if refusal.startswith(f"'{value}' is not one")), "")
