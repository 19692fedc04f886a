"""Start vLLM and call it: with connector.py the only file that knows vLLM's classes.

What both assume of vLLM is in ASSUMED, and is compared with the installed version at the start.
"""

import importlib
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

from serving_core.errors import SettingsError
from serving_core.requests import NO_TOKEN
from splitserve_vllm.sampling import TRANSFER

TESTED: Final = ("0.32.0", "0.33.0")
CONNECTOR: Final = ("splitserve_vllm.connector", "SplitServeConnector")
BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
UNDIVIDED: Final = ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
"""Fields of vLLM's arguments that are 1 on a node."""
ASSUMED: Final[Mapping[tuple[str, str], Sequence[str]]] = {
    ("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args"): ("args",),
    ("vllm.inputs", "tokens_input"): ("prompt_token_ids", "cache_salt"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.from_engine_args"): ("engine_args", "stat_loggers"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.generate"): ("prompt", "sampling_params", "request_id"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.shutdown"): ("timeout",),
    ("vllm.v1.metrics.loggers", "StatLoggerBase.record"): ("scheduler_stats", "iteration_stats"),
    ("vllm.platforms.cpu", "CpuPlatform.pack_kv_cache"): ("kv_cache", "indices"),
    (BASE, "KVConnectorBase_V1.__init__"): ("vllm_config", "role", "kv_cache_config"),
    (BASE, "KVConnectorBase_V1.register_kv_caches"): ("kv_caches",),
    (BASE, "KVConnectorBase_V1.bind_connector_metadata"): ("connector_metadata",),
    (BASE, "KVConnectorBase_V1.save_kv_layer"): ("layer_name", "kv_layer", "attn_metadata"),
    (BASE, "KVConnectorBase_V1.requires_piecewise_for_cudagraph"): ("extra_config",),
    (BASE, "KVConnectorBase_V1.get_transfer_results"): ("finished_req_ids",),
    (BASE, "KVConnectorTransferResults"): ("finished_sending", "finished_recving", "failed_recving"),
    ("vllm.v1.kv_cache_interface", "group_kernel_blocks"): ("cache", "num_blocks"),
    ("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank"): (),
    (BASE, "KVConnectorBase_V1.get_num_new_matched_tokens"): ("request", "num_computed_tokens"),
    (BASE, "KVConnectorBase_V1.update_state_after_alloc"): ("request", "blocks", "num_external_tokens"),
    (BASE, "KVConnectorBase_V1.build_connector_meta"): ("scheduler_output",),
    (BASE, "KVConnectorBase_V1.request_finished"): ("request", "block_ids"),
}
"""Methods of vLLM that are called or overridden, with the parameters that are relied on."""


def release() -> str:
    """Return the version of vLLM, without its build; import nothing of it. Raises SettingsError if vLLM is missing or
    not one of TESTED.
    """
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        raise SettingsError(f"vLLM is not installed in this environment: pip install vllm=={TESTED[0]}") from None
    number = installed.partition("+")[0]
    if number not in TESTED:
        raise SettingsError(f"vLLM {installed} is not tested with SplitServe, which needs {' or '.join(TESTED)}")
    return number


def check_vllm() -> None:
    """Raise SettingsError if the installed vLLM lacks what is assumed. Imports vLLM."""
    if changes := _changes():
        raise SettingsError(f"vLLM {release()} has changed what SplitServe relies on: {'; '.join(changes)}")


def _changes() -> list[str]:
    changes = []
    for (module, path), parameters in ASSUMED.items():
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            changes.append(f"{module} has no {path}")
            continue
        if missing := [name for name in parameters if name not in inspect.signature(found).parameters]:
            changes.append(f"{path} has no parameter {', '.join(missing)}")
    return changes


class Stats(NamedTuple):
    """What vLLM reports after a step."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of the blocks in use
    num_prompt_tokens: int  # computed by the step, as is the next
    num_output_tokens: int


class Token(NamedTuple):
    """One output token."""

    token_id: int
    logprobs: Mapping[int, Any] | None  # of the tokens at its position, by id
    finish_reason: str | None  # of the last token of an output
    num_cached_tokens: int  # of the prompt
    prefill_s: float  # from the first step with the prompt to the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """The sizes and choices of a started vLLM."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    kv_cache_dtype: str
    quantization: str
    device: str
    tp_size: int


class Vllm:
    """One running vLLM: its front end here, its scheduler and its workers in processes of their own."""

    def __init__(
        self,
        arguments: Any,
        connector: Mapping[str, Any],
        on_stats: Callable[[Stats], None],
        kv_events: str,
    ) -> None:
        """Start vLLM with what `vllm_arguments` has returned, which takes minutes. `connector` goes to the KV connector
        of each of its processes; at the ZeroMQ endpoint `kv_events` vLLM publishes changes of its prefix cache.

        Raises SettingsError for flags that vLLM refuses.
        """
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        module, name = CONNECTOR
        arguments.kv_transfer_config = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_connector_extra_config=dict(connector),
            kv_load_failure_policy="fail",
        )
        arguments.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=kv_events)
        try:
            self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[_logger_of(on_stats)])
        except (ValueError, RuntimeError) as error:  # of a check of its flags; of a process that it starts
            raise SettingsError(f"vLLM does not start; its log above says why: {error}") from error
        self.facts = _facts(self._engine.vllm_config)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        fields: Mapping[str, Any],
        transfer: Mapping[str, Any],
        cache_salt: str = "",
    ) -> AsyncGenerator[Token]:
        """Yield the output tokens of a prompt. Ending the iteration aborts the request.

        `fields` are the arguments of SamplingParams, `transfer` what the KV connector learns of the request. KV is
        shared only between prompts with the same `cache_salt`.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        extra = {TRANSFER: dict(transfer)} if transfer else None
        params = SamplingParams(**fields, extra_args=extra, output_kind=RequestOutputKind.DELTA)
        prompt = tokens_input(list(token_ids), cache_salt=cache_salt or None)
        generated = self._engine.generate(prompt, params, request_id)
        async with aclosing(generated) as outputs:
            async for output in outputs:
                for token in _tokens(output):
                    yield token

    @property
    def is_dead(self) -> bool:
        """Return whether vLLM's scheduler or one of its workers has ended."""
        return bool(self._engine.errored)

    def close(self) -> None:
        self._engine.shutdown(timeout=0)


def vllm_arguments(model: str, flags: Sequence[str]) -> Any:
    """Return vLLM's arguments with the node's own among them; `tensor_parallel_size` is the number of its workers.

    Imports vLLM. Raises SettingsError for flags that vLLM does not know, and for workers in stages or replicas.
    """
    for name in ("VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        os.environ.setdefault(name, "1")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    own = ["--model", model, "--skip-tokenizer-init", "--disable-log-stats"]
    try:
        arguments = AsyncEngineArgs.from_cli_args(parser.parse_args([*own, *flags]))
    except SystemExit as error:  # argparse has told why
        raise SettingsError(f"vLLM does not know the flags {' '.join(flags)}") from error
    for name in UNDIVIDED:
        if (size := getattr(arguments, name)) > 1:
            flag = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{flag} {size}: a node with vLLM sends KV of tensor-parallel ranks alone")
    return arguments


def _facts(config: Any) -> VllmFacts:
    model, cache, scheduler, parallel = (
        config.model_config,
        config.cache_config,
        config.scheduler_config,
        config.parallel_config,
    )
    return VllmFacts(
        num_blocks=cache.num_gpu_blocks,
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(cache.cache_dtype),
        quantization=str(model.quantization or "none"),
        device=str(config.device_config.device_type),
        tp_size=parallel.tensor_parallel_size,
    )


def _tokens(output: Any) -> list[Token]:
    (completion,), times = output.outputs, output.metrics
    prefill_s = max(0.0, times.first_token_ts - times.scheduled_ts) if times is not None else 0.0
    token_ids, logprobs, reason = list(completion.token_ids), completion.logprobs, completion.finish_reason
    if not token_ids and reason is not None:
        token_ids, logprobs = [NO_TOKEN], None
    last, num_cached = len(token_ids) - 1, output.num_cached_tokens or 0
    return [
        Token(each, logprobs[index] if logprobs else None, reason if index == last else None, num_cached, prefill_s)
        for index, each in enumerate(token_ids)
    ]


def _logger_of(on_stats: Callable[[Stats], None]) -> Callable[..., Any]:
    """Return a maker of vLLM's stat loggers that passes on what a step reports."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
            if scheduler_stats is None:
                return
            num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            nums = (0, 0)
            if iteration_stats is not None:
                nums = iteration_stats.num_prompt_tokens, iteration_stats.num_generation_tokens
            on_stats(Stats(scheduler_stats.num_running_reqs, num_waiting, scheduler_stats.kv_cache_usage, *nums))

        def log_engine_initialized(self) -> None: ...

    return Logger
