"""Start a node with vLLM: flags, checks, vLLM itself, and the link to the coordinator."""

import logging
import os
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import psutil
import zmq
import zmq.asyncio

from kv_transfer.descriptor import endpoint_of, host_of
from serving_core.errors import RankLost
from serving_core.flags import settings_command
from serving_core.model_files.config import ModelConfig, read_model_config
from serving_core.model_files.fingerprint import fingerprint, model_facts
from serving_core.net.descriptors import kept_spares
from serving_core.net.ports import Port, SocketFolder, check_exposure, check_ports, is_loopback
from serving_core.net.tls import CLIENT, check_purpose
from serving_core.node.costs import StepRates
from serving_core.process.extras import require
from serving_core.process.run import run_process
from serving_node.health import health_port, node_states
from serving_node.lifetime import serve
from serving_node.link import FleetLink
from serving_node.ranks.leading import Followers, end_at_once
from splitserve_vllm.node import VllmNode
from splitserve_vllm.seam import Stats, Vllm, VllmFacts, check_vllm, release, vllm_arguments
from splitserve_vllm.settings import OUR_ORDER, VllmSettings, check_vllm_flags

logger = logging.getLogger(__name__)

WARM_UP_TOKENS: Final = 256
LOOPBACK: Final = "127.0.0.1"
FLAGS_KEY: Final = f"{__name__}.flags"


def node_command(role: str) -> click.Command:
    """Return the command line of a node with vLLM that begins in this role. vLLM's own flags follow `--`."""
    help = f"Run one node with vLLM that begins as {role}. vLLM's own flags follow --."

    def keep(context: click.Context, _: click.Parameter, flags: tuple[str, ...]) -> None:
        context.meta[FLAGS_KEY] = flags

    def run(settings: VllmSettings) -> None:
        run_node(role, settings, click.get_current_context().meta[FLAGS_KEY])

    command = settings_command(VllmSettings, run, name=role, help=help)
    command.params.append(
        click.Argument(["vllm_flags"], nargs=-1, type=click.UNPROCESSED, callback=keep, expose_value=False)
    )
    return command


def run_node(role: str, settings: VllmSettings, vllm_flags: tuple[str, ...]) -> None:
    """Run a node until SIGTERM. The process ends with vLLM."""
    name = settings.link.name_for(role)

    async def main() -> None:
        require("node")
        release()
        check_vllm_flags(vllm_flags)
        _check_network(settings)
        try:
            await serve_node(settings, vllm_flags, role, name)
        except RankLost as error:
            _kill_children()
            end_at_once(f"this node ends: {error}")

    run_process(role, name, settings.link.log, main)


async def serve_node(settings: VllmSettings, vllm_flags: Sequence[str], role: str, name: str) -> None:
    """Start vLLM, and serve until a signal. Raises SettingsError, ModelError or RankLost."""
    from splitserve.launch.models import resolve

    folder = resolve(settings.model, logger.info).folder
    config = read_model_config(folder, "auto", "auto")
    await FleetLink(settings.link).check()  # before vLLM's start, which takes minutes
    check_vllm()
    arguments = vllm_arguments(str(folder), vllm_flags)
    workers = Followers(arguments.tensor_parallel_size, silence_s=settings.step_timeout_s)
    started: list[Vllm] = []
    reports: list[VllmNode] = []

    def start(meeting: bytes) -> list[bytes]:
        """Start vLLM, whose workers dial the address in `meeting`."""

        def take(stats: Stats) -> None:
            if reports:
                reports[0].take_stats(stats)

        started.append(Vllm(arguments, _for_connector(settings, meeting), take, endpoint))
        return []

    sockets, context = SocketFolder(), zmq.asyncio.Context()
    endpoint = f"ipc://{sockets.path}/kv-events"
    sockets.make()
    kv_events = context.socket(zmq.SUB)
    try:
        kv_events.connect(endpoint)
        kv_events.subscribe(b"")
        await workers.gather(start, LOOPBACK)
        engine = started[0]
        prefill_tokens_per_s = await _warm_up(engine)
        async with kept_spares() as spares:
            link = FleetLink(settings.link, spares)
            node = VllmNode(
                name,
                role,
                engine,
                workers,
                link,
                StepRates(prefill_tokens_per_s),
                fingerprint=_fingerprint(settings, folder, config, engine.facts),
                numerics={"engine": f"vllm {release()}", "device": engine.facts.device, "machine": platform.machine()},
                eos_token_ids=tuple(config.eos_token_ids),
                max_num_queued=settings.max_num_queued,
                descriptor_timeout_s=settings.descriptor_timeout_s,
                credit_timeout_s=settings.credit_timeout_s,
                step_timeout_s=settings.step_timeout_s,
                kv_events=partial(_payload, kv_events),
            )
            reports.append(node)
            async with health_port(settings, node_states(node, link)):
                await serve(node, link, drain_s=settings.link.drain_s)
    finally:
        for engine in started:
            engine.close()
        _kill_children()
        context.destroy(linger=0)
        sockets.remove()


async def _payload(socket: "zmq.asyncio.Socket") -> bytes:
    """Return the next batch of KV events: a message of topic, number and payload."""
    *_, payload = await socket.recv_multipart()
    return payload


def _for_connector(settings: VllmSettings, meeting: bytes) -> dict[str, Any]:
    """Return what the KV connector in vLLM's workers must know."""
    return {
        "meeting": meeting.hex(),
        "secret": secrets.token_hex(32),
        "node_pid": os.getpid(),
        "kv_bind": settings.kv_bind,
        "kv_order": settings.kv_order,
        "kv_shared_memory": settings.kv_shared_memory,
        "is_encrypted": bool(settings.link.tls.tls_ca) and not _is_local(settings),
        "transfer_timeout_s": settings.transfer_timeout_s,
        "reservation_ttl_s": settings.reservation_ttl_s,
        "hold_s": settings.descriptor_timeout_s + settings.transfer_timeout_s,
    }


async def _warm_up(engine: Vllm) -> float:
    """Compute a prompt, whose first step may take long, and again; return the prompt tokens/s of the second."""
    num_tokens = min(WARM_UP_TOKENS, engine.facts.max_model_len // 2, engine.facts.max_num_batched_tokens)
    fields: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}
    seconds = 0.0
    for number in range(2):
        began_s = time.monotonic()
        async for _ in engine.generate(f"warm-up-{number}", [number] * num_tokens, fields, {}):
            seconds = time.monotonic() - began_s
    return num_tokens / seconds


def _fingerprint(settings: VllmSettings, folder: Path, config: ModelConfig, facts: VllmFacts) -> dict[str, str]:
    """Return what must be equal on all nodes of a fleet: the model, and the bytes of a KV block."""
    if settings.kv_order == OUR_ORDER:  # that of a node with our engine
        layout = config.kv_layout(facts.block_size, facts.dtype)
        ours = fingerprint(folder, config, layout, facts.dtype, facts.quantization)
        return {**ours, "kv_transport": "zmq"}
    return {
        **model_facts(folder, config),
        "engine": "vllm",
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "kv_cache_dtype": facts.kv_cache_dtype,
        "block_size": str(facts.block_size),
        "tensor_parallel_size": str(facts.tp_size),
        "kv_order": f"vllm {release()} {facts.device} {_instructions(facts.device)}".rstrip(),
        "kv_transport": "zmq",
    }


def _instructions(device: str) -> str:
    """Return the instruction set of a CPU, which decides the order of values in vLLM's KV blocks; empty for others."""
    if device != "cpu":
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _check_network(settings: VllmSettings) -> None:
    """Raise SettingsError for unusable TLS files, a port in use, or unprotected exposure."""
    check_purpose(settings.link.tls.files, CLIENT)
    ports = [Port("--health-port", settings.health_host, settings.health_port)]
    endpoint = endpoint_of("zmq", settings.kv_bind, 0)
    if (host := host_of(endpoint)) is not None:
        check_exposure(host, "fleet_secret", settings.link.fleet_secret)
        port = endpoint.rpartition(":")[2]
        ports.append(Port("--kv-bind", host, 0 if port == "*" else int(port)))
    check_ports(ports)


def _is_local(settings: VllmSettings) -> bool:
    host = host_of(endpoint_of("zmq", settings.kv_bind, 0))
    return host is None or is_loopback(host)


def _kill_children() -> None:
    """Kill what is left of vLLM's processes."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
