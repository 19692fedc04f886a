"""The coordinator's two gRPC servers and its HTTP server, put together: start, drain, stop."""

import asyncio
import logging
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coordinator.control.journal import Journal
from coordinator.control.ledger import Ledger
from coordinator.control.live import NUM_EPOCHS
from coordinator.control.metrics import Metrics
from coordinator.control.overview import Overview
from coordinator.control.placement.policies import POLICIES
from coordinator.control.registry import MAX_FIRST_SESSION, Registry
from coordinator.control.roles import Roles
from coordinator.control.router import has_path
from coordinator.control.slo import SloClasses, parse_slo_classes
from coordinator.control.tracker import Tracker
from coordinator.dispatcher import Dispatcher
from coordinator.doors.admin_service import AdminService
from coordinator.doors.authentication import NO_API_KEY, NO_FLEET_SECRET, BearerAuthentication, BearerSecrets
from coordinator.doors.caps import SPARE, connection_caps
from coordinator.doors.exposition import Exposition
from coordinator.doors.front import Front, ServedModel
from coordinator.doors.http.app import make_app
from coordinator.doors.http.counting import HttpCounts
from coordinator.doors.http.page import Page
from coordinator.doors.http.serving import HttpServer
from coordinator.doors.inference_service import InferenceService
from coordinator.doors.reflection import add_reflection
from coordinator.doors.sampling_defaults import neutral_defaults, read_sampling_defaults
from coordinator.doors.statuses import StatusInterceptor
from coordinator.doors.tls import ServerTls
from coordinator.fleet_service import FleetService
from coordinator.settings import (
    ADMIT_ALL,
    CoordinatorSettings,
    api_keys,
    check_settings,
    model_names,
    origins,
)
from coordinator.text.answer_format import AnswerFormat, answer_format
from coordinator.text.structures import Structures
from coordinator.text.tokenizer import read_tokenizer
from protos import inference_pb2, inference_pb2_grpc
from serving_core.channels import fleet_options, listen, public_options
from serving_core.descriptors import num_descriptors
from serving_core.errors import ModelError, SettingsError
from serving_core.model_config import read_model_config
from serving_core.ports import Port, check_ports

if TYPE_CHECKING:  # what it imports is of an extra
    from coordinator.traces.export import Traces

logger = logging.getLogger(__name__)

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN: Final = inference_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
IDLE_CONNECTIONS_PER_CALL: Final = 2
SPARE_CALLS: Final = 256  # beyond the answers in flight: health watchers, status queries, calls to be refused politely
STOP_GRACE_S: Final = 1.0
MAX_TICK_S: Final = 0.25


class CoordinatorServer:
    """One coordinator. Must be made on a running event loop; raises SettingsError or ModelError when it cannot be
    made or started."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        check_settings(settings)
        self._settings = settings
        self._model = _read_model(settings)
        config = self._model.config
        self._registry = Registry(
            {
                "architecture": config.architecture,
                "vocab_size": str(config.vocab_size),
                "embedder": str(config.embedder),
            },
            node_timeout_s=settings.node_timeout_s,
            step_timeout_s=settings.step_timeout_s,
            first_session=1 + secrets.randbelow(MAX_FIRST_SESSION),
            model_names=self._model.names,
            embeds=config.embedder is not None,
        )
        ledger = Ledger()
        slo_classes = parse_slo_classes(settings.slo_class)
        metrics = self._metrics = Metrics(slo_classes)
        journal = Journal(metrics)
        self._tracker = Tracker(
            self._registry,
            ledger,
            metrics,
            first_epoch=secrets.randbelow(NUM_EPOCHS),
            max_live=settings.max_num_queued_reqs,
            max_restarts=settings.max_restarts,
            keep_after_s=settings.keep_after_s,
            node_wait_s=settings.node_wait_s,
            policy=POLICIES[settings.policy],
            admits_late=settings.admission == ADMIT_ALL,
        )
        roles = Roles(self._registry, ledger, policy=settings.roles)
        self._dispatcher = Dispatcher(self._registry, self._tracker, roles, journal)
        self._overview = Overview(
            self._registry,
            ledger,
            self._tracker,
            metrics,
            model_name=self._model.name,
            start_s=time.monotonic(),
            limits={each.name: each.limits for each in slo_classes},
        )
        self._http_counts = HttpCounts()
        self._exposition = Exposition(metrics, self._tracker, self._registry, self._model.name, self._http_counts)
        self._traces = _traces(settings)
        self._front = Front(
            self._model,
            self._registry,
            self._dispatcher,
            journal,
            max_logprobs=settings.max_logprobs,
            request_timeout_s=settings.request_timeout_s,
            strict_fields=settings.strict_fields,
            slo_classes=SloClasses(slo_classes),
            traces=self._traces,
        )
        self._max_calls = settings.max_num_queued_reqs + SPARE_CALLS
        self._caps = connection_caps(
            num_descriptors(),
            useful=IDLE_CONNECTIONS_PER_CALL * self._max_calls,
            wanted=settings.max_connections,
            wanted_per_peer=settings.max_connections_per_peer,
        )
        self._health = health.aio.HealthServicer()
        files, verifies = settings.tls.files, settings.tls_verify_clients
        self._tls = ServerTls(files, verifies_clients=verifies) if files.cert else None
        holders = api_keys(settings)
        self._api_keys = BearerSecrets(holders) if holders else None
        self._public, self._fleet = self._public_server(), self._fleet_server()
        self._supervision: asyncio.Task[None] | None = None
        self._http = self._http_server() if settings.http_port >= 0 else None
        self.port = self.fleet_port = 0  # the ports listened on, once started
        self.http_port = -1  # likewise; -1 without HTTP

    async def start(self) -> None:
        """Listens on all ports. Ready is only who has nodes that read and write: see the health service."""
        settings = self._settings
        check_ports(
            [
                Port("--port", settings.host, settings.port),
                Port("--fleet-port", settings.fleet_host, settings.fleet_port),
                Port("--http-port", settings.http_host, settings.http_port),
            ]
        )
        tls = self._tls
        public_tls = tls.grpc_credentials(verifies=settings.tls_verify_clients) if tls else None
        fleet_tls = tls.grpc_credentials(verifies=True) if tls and settings.tls.tls_ca else None
        self.port = listen(self._public, settings.host, settings.port, public_tls)
        self.fleet_port = listen(self._fleet, settings.fleet_host, settings.fleet_port, fleet_tls)
        if self._http is not None:
            self.http_port = self._http.listen(settings.http_host, settings.http_port)
        await self._report_health()
        await self._fleet.start()
        await self._public.start()
        if self._http is not None:
            await self._http.start()
        self._supervision = asyncio.create_task(self._supervise())
        dialled = "clients may dial port %d, nodes port %d, HTTP clients %s"
        logger.info(dialled, self.port, self.fleet_port, self.http_port if self._http is not None else "none")
        caps = self._caps
        capped = "at most %d connections of gRPC clients, %d of HTTP clients (%d of one address) and %d of nodes"
        logger.info(capped, caps.public, caps.http, caps.http_per_peer, caps.fleet)

    async def wait(self) -> None:
        """Waits as long as the server runs, after `start`; raises when it has failed."""
        assert self._supervision is not None, "the server has not been started"
        await asyncio.shield(self._supervision)

    def reread_api_keys(self) -> None:
        """Takes the API keys that are in their file now, from the next call on; those before stay where it has none."""
        assert self._api_keys is not None, "there is no file of API keys"
        try:
            holders = api_keys(self._settings)
        except SettingsError as error:
            logger.warning("the API keys stay what they were: %s", error)
        else:
            self._api_keys.replace(holders)
            logger.info("%d API keys are in force", len(holders))

    async def drain(self) -> None:
        """Refuses new calls and returns when the live ones have ended, or after drain_s."""
        logger.info("draining")
        self._dispatcher.drain()
        await self._report_health()
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._dispatcher.idle()
        except TimeoutError:
            logger.warning("calls still live after %g s", self._settings.drain_s)

    async def stop(self) -> None:
        """Ends what is live and closes all ports."""
        if self._supervision is not None:
            self._supervision.cancel()
        self._dispatcher.drain()
        self._dispatcher.stop()
        stopping = [self._public.stop(STOP_GRACE_S), self._fleet.stop(STOP_GRACE_S)]
        if self._http is not None:
            stopping.append(self._http.stop(STOP_GRACE_S))
        await asyncio.gather(*stopping)
        if self._traces is not None:
            await self._traces.stop()
        logger.info("stopped")

    def _public_server(self) -> grpc.aio.Server:
        interceptors: list[grpc.aio.ServerInterceptor] = [StatusInterceptor()]
        if self._api_keys is not None:
            interceptors.insert(0, BearerAuthentication(self._api_keys, NO_API_KEY))
        server = grpc.aio.server(
            interceptors=interceptors,
            options=public_options(self._caps.public, longest_call_s=self._settings.request_timeout_s),
            maximum_concurrent_rpcs=self._max_calls,
        )
        service = InferenceService(
            self._front,
            self._registry,
            self._tracker,
            self._dispatcher,
            self._metrics,
            instance_id=self._settings.instance_id,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
        admin = AdminService(self._dispatcher, self._tracker, self._overview)
        inference_pb2_grpc.add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection((INFERENCE, ADMIN, health.SERVICE_NAME), server)
        return server

    def _http_server(self) -> HttpServer:
        app = make_app(
            self._front,
            self._is_serving,
            self._exposition,
            Page(self._overview) if self._settings.ui else None,
            counts=self._http_counts,
            secrets=self._api_keys,
            allowed_origins=origins(self._settings.allowed_origins),
            max_calls=min(self._max_calls, self._caps.http - SPARE),
        )
        context, caps = self._tls.http_context() if self._tls else None, self._caps
        return HttpServer(app, max_connections=caps.http, max_per_peer=caps.http_per_peer, tls=context)

    def _fleet_server(self) -> grpc.aio.Server:
        secret = self._settings.fleet_secret
        interceptors = [BearerAuthentication(BearerSecrets({secret: ""}), NO_FLEET_SECRET)] if secret else []
        server = grpc.aio.server(interceptors=interceptors, options=fleet_options(self._caps.fleet))
        service = FleetService(self._dispatcher, heartbeat_s=self._settings.heartbeat_s)
        server.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)  # where clients cannot crowd it out
        return server

    async def _supervise(self) -> None:
        """Lets time pass for nodes and answers, and keeps the health service and the certificates up to date."""
        tick_s = min(MAX_TICK_S, self._settings.node_timeout_s / 8)
        changed = self._dispatcher.nodes_changed
        while True:
            try:
                async with asyncio.timeout(tick_s):
                    await changed.wait()
            except TimeoutError:
                pass
            changed.clear()
            self._dispatcher.tick()
            self._overview.tick(time.monotonic())
            if self._tls is not None:
                self._tls.refresh()
            await self._report_health()

    async def _report_health(self) -> None:
        is_path = has_path(self._registry.nodes, embeds=self._registry.embeds)
        is_ready = is_path and not self._dispatcher.is_draining
        status = health_pb2.HealthCheckResponse
        await self._health.set(INFERENCE, status.SERVING if is_ready else status.NOT_SERVING)

    async def _is_serving(self) -> bool:
        """What the health service says."""
        reply = await self._health.Check(health_pb2.HealthCheckRequest(service=INFERENCE), None)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _read_model(settings: CoordinatorSettings) -> ServedModel:
    if not settings.model:
        raise ModelError("no model folder was given")
    folder = Path(settings.model)
    config = read_model_config(folder, settings.model_impl, settings.runner)
    tokenizer = read_tokenizer(
        folder,
        chat_template=settings.chat_template,
        template_kwargs_json=settings.chat_template_kwargs,
        embeds=config.embedder is not None,
    )
    return ServedModel(
        names=model_names(settings.served_model_name) or [folder.resolve().name],
        config=config,
        tokenizer=tokenizer,
        answer_format=_answer_format(settings, tokenizer.template_words),
        structures=Structures(folder, config.eos_token_ids),
        max_model_len=settings.max_model_len or config.max_position_embeddings,
        sampling_defaults=_sampling_defaults(settings, folder),
    )


def _traces(settings: CoordinatorSettings) -> "Traces | None":
    if not settings.otlp_endpoint:
        return None
    from coordinator.traces.export import Traces

    return Traces(settings.otlp_endpoint)


def _answer_format(settings: CoordinatorSettings, template: str) -> AnswerFormat:
    found = answer_format(settings.tool_call_parser, settings.reasoning_parser, template)
    if found.has_calls or found.thinks:
        told = "calls of tools are read as %s, thoughts %s"
        logger.info(told, found.calls, "apart from the answer" if found.thinks else "as the answer")
    return found


def _sampling_defaults(settings: CoordinatorSettings, folder: Path) -> inference_pb2.SamplingParams:
    neutral = neutral_defaults()
    if settings.generation_config == "none":
        return neutral
    defaults, problems = read_sampling_defaults(folder)
    for problem in problems:
        logger.warning("ignored in generation_config.json: %s", problem)
    if defaults != neutral:
        named = ", ".join(f"{field.name} {value:g}" for field, value in defaults.ListFields())
        logger.info("requests that do not say otherwise are sampled as the model's folder says: %s", named)
    return defaults
