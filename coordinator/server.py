"""Assemble the coordinator: control, which places and tracks requests, the fleet port, and one or several API
servers."""

import asyncio
import logging
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from coordinator.api.admin_service import AdminService, StatusService
from coordinator.api.authentication import NO_FLEET_SECRET, BearerAuthentication, BearerSecrets
from coordinator.api.connections import FLEET, Sheds
from coordinator.api.control import LocalControl
from coordinator.api.exposition import Exposition
from coordinator.api.grpc_port import GrpcPort
from coordinator.api.health import HealthService
from coordinator.api.http.middleware import HttpCounts
from coordinator.api.overview import Overview
from coordinator.api.public import STOP_GRACE_S, Behind, PublicApi, caps
from coordinator.api.statuses import StatusInterceptor
from coordinator.api.tls import ServerTls
from coordinator.api_server_processes import ApiServers
from coordinator.api_server_service import ApiServerService
from coordinator.control.instructions import NUM_EPOCHS
from coordinator.control.load import Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import MAX_FIRST_SESSION, Registry
from coordinator.control.placement.policy import POLICIES
from coordinator.control.request_log import RequestLog
from coordinator.control.roles import Roles
from coordinator.control.scheduler import Scheduler
from coordinator.control.slo import SloClasses, parse_slo_classes
from coordinator.dispatcher import Dispatcher
from coordinator.fleet_service import FleetService
from coordinator.served_model import read_served_model
from coordinator.settings import ADMIT_ALL, CoordinatorSettings, check_settings
from protos import inference_pb2, inference_pb2_grpc
from serving_core.model_files.fingerprint import model_facts
from serving_core.net.channels import SERVER_OPTIONS, fleet_options
from serving_core.net.ports import Port, check_ports

if TYPE_CHECKING:  # needs the extra otel
    from coordinator.traces.export import Traces

logger = logging.getLogger(__name__)

MAX_TICK_S: Final = 0.25


class CoordinatorServer:
    """Run one coordinator: `start`, `open`, `wait`, `drain`, `stop`. Must be created on a running event loop.

    Creating, starting or opening it raises SettingsError or ModelError.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        check_settings(settings)
        self._settings = settings
        self._model = read_served_model(settings)
        self._registry = Registry(
            model_facts(Path(settings.model), self._model.config),
            node_timeout_s=settings.node_timeout_s,
            step_timeout_s=settings.step_timeout_s,
            first_session=1 + secrets.randbelow(MAX_FIRST_SESSION),
            model_names=self._model.names,
            embeds=self._model.config.embedder is not None,
        )
        ledger = Ledger()
        slo_classes = parse_slo_classes(settings.slo_class)
        self._metrics = Metrics(slo_classes)
        self._request_log = RequestLog(self._metrics)
        self._scheduler = Scheduler(
            self._registry,
            ledger,
            self._metrics,
            first_epoch=secrets.randbelow(NUM_EPOCHS),
            max_live=settings.max_num_queued_reqs,
            max_live_per_asker=settings.max_num_queued_reqs_per_key,
            max_restarts=settings.max_restarts,
            keep_after_s=settings.keep_after_s,
            node_wait_s=settings.node_wait_s,
            fetches=settings.remote_prefix_fetch,
            policy=POLICIES[settings.policy],
            admits_late=settings.admission == ADMIT_ALL,
            max_queue_wait_s=settings.max_queue_wait_s,
        )
        roles = Roles(self._registry, ledger, policy=settings.roles)
        self._dispatcher = Dispatcher(
            self._registry,
            self._scheduler,
            roles,
            self._request_log,
            node_wait_s=settings.node_wait_s,
            stream_interval=settings.stream_interval,
        )
        self._overview = Overview(
            self._registry,
            ledger,
            self._scheduler,
            self._metrics,
            model_name=self._model.name,
            start_s=time.monotonic(),
            limits={each.name: each.limits for each in slo_classes},
        )
        self._traces = _traces(settings)
        files, verifies = settings.tls.files, settings.tls_verify_clients
        self._tls = ServerTls(files, verifies_clients=verifies) if files.cert else None
        self._caps = caps(settings)
        self._health = HealthService()
        self._sheds = Sheds()
        self._http_counts = HttpCounts()
        self._control = LocalControl(
            self._registry, self._dispatcher, self._request_log, SloClasses(slo_classes), self._traces
        )
        self._status, self._admin = self._status_service(), self._admin_service()
        self._api_servers = ApiServerService(
            self._registry,
            self._dispatcher,
            self._control,
            SloClasses(slo_classes),
            count_call=self._http_counts.ended,
            sheds=self._sheds,
            metrics=lambda: self._exposition.render(),
        )
        self._exposition = self._made_exposition()
        self._fleet = self._fleet_port()
        self._public: PublicApi | ApiServers = (
            self._api_server() if settings.api_server_count == 1 else self._api_server_processes()
        )
        self._supervision: asyncio.Task[None] | None = None
        self.port = self.fleet_port = 0  # set by `start`
        self.http_port = -1  # set by `start`; -1 without HTTP

    @property
    def ports(self) -> list[Port]:
        """Return the ports that `start` binds."""
        settings = self._settings
        return [
            Port("--grpc-port", settings.host, settings.grpc_port),
            Port("--fleet-port", settings.fleet_host, settings.fleet_port),
            Port("--http-port", settings.http_host, settings.http_port),
        ]

    async def start(self) -> None:
        """Bind all ports and serve nodes, not yet clients; sets `port`, `fleet_port` and `http_port`.

        `stop` releases the ports. Raises SettingsError when a port cannot be used.
        """
        settings = self._settings
        check_ports(self.ports)
        fleet_tls = self._tls if settings.tls.tls_ca else None
        self._public.listen()
        self.fleet_port = self._fleet.listen(settings.fleet_host, settings.fleet_port, fleet_tls, verifies=True)
        self.port, self.http_port = self._public.port, self._public.http_port
        await self._public.report()
        await self._fleet.start()
        self._supervision = asyncio.create_task(self._supervise())

    async def open(self) -> None:
        """Start to serve clients, and log the ports. Requires `start`.

        The health service reports SERVING only while nodes for prefill and decode are attached.
        """
        await self._public.start()
        dialled = "clients may dial port %d, nodes port %d, HTTP clients %s"
        logger.info(dialled, self.port, self.fleet_port, self.http_port if self.http_port >= 0 else "none")
        caps = self._caps
        capped = "at most %d connections of gRPC clients, %d of HTTP clients (%d of one address) and %d of nodes"
        logger.info(capped, caps.public, caps.http, caps.per_peer, caps.fleet)

    async def wait(self) -> None:
        """Wait while the server runs, and raise the error that ends it. Requires `start`."""
        assert self._supervision is not None, "the server has not been started"
        await asyncio.shield(self._supervision)

    def reread_api_keys(self) -> None:
        """Load the API keys from their file again, for later calls. Keeps the old keys when the file cannot be used."""
        self._public.reread_api_keys()

    async def drain(self) -> None:
        """Refuse new calls, and wait until the open ones have ended, at most drain_s seconds of the settings.

        Calls of API servers by themselves are neither refused nor waited for: they go on at the next coordinator.
        """
        logger.info("draining: new calls are refused, and live ones have %g s to end", self._settings.drain_s)
        self._dispatcher.drain(hands_over=True)
        await self._public.report()
        self._api_servers.tell()
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._dispatcher.idle()
        except TimeoutError:
            logger.warning("calls still live after %g s", self._settings.drain_s)

    async def stop(self) -> None:
        """End all calls, close all ports, and send the traces that wait to be exported."""
        if self._supervision is not None:
            self._supervision.cancel()
        self._dispatcher.drain()
        self._dispatcher.stop()
        self._api_servers.end()
        await asyncio.gather(self._public.stop(), self._fleet.stop(STOP_GRACE_S))
        if self._traces is not None:
            await self._traces.stop()
        logger.info("stopped")

    def _api_server(self) -> PublicApi:
        """Create the API server that runs in this process."""

        async def metrics() -> bytes:
            return self._exposition.render()

        async def overview(after: int | None) -> inference_pb2.Overview:
            return self._overview.to_wire(time.monotonic(), after=after)

        async def change_adapters(method: str, request: Message) -> None:
            await getattr(self._admin, method)(request, None)

        behind = Behind(
            self._control,
            self._status,
            self._admin,
            metrics,
            overview,
            change_adapters,
            self._http_counts.ended,
            self._sheds,
        )
        return PublicApi(self._settings, self._model, behind, self._tls, self._health)

    def _api_server_processes(self) -> ApiServers:
        """Create the API servers that run as processes of their own."""
        server = grpc.aio.server(interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
        self._serve_api_servers(server)
        return ApiServers(self._settings, self._api_servers, server, self._health)

    def _serve_api_servers(self, server: grpc.aio.Server) -> None:
        """Register what API servers ask for."""
        server.add_generic_rpc_handlers((self._api_servers.handler(),))
        inference_pb2_grpc.add_InferenceServicer_to_server(self._status, server)
        inference_pb2_grpc.add_AdminServicer_to_server(self._admin, server)

    def _made_exposition(self) -> Exposition:
        return Exposition(
            self._metrics,
            self._scheduler,
            self._registry,
            self._model.name,
            self._http_counts,
            self._api_servers.figures,
            self._sheds,
        )

    def _admin_service(self) -> AdminService:
        has_admin_key = bool(self._settings.admin_key)
        return AdminService(
            self._dispatcher, self._overview, lambda: self._api_servers.tell(), has_admin_key=has_admin_key
        )

    def _status_service(self) -> StatusService:
        return StatusService(
            self._registry, self._scheduler, self._dispatcher, self._metrics, instance_id=self._settings.instance_id
        )

    def _fleet_port(self) -> GrpcPort:
        secret = self._settings.fleet_secret
        keys = BearerSecrets({secret: ""}) if secret else None
        interceptors: list[grpc.aio.ServerInterceptor] = [StatusInterceptor()]
        if keys is not None:
            interceptors.insert(0, BearerAuthentication(keys, NO_FLEET_SECRET))
        server = grpc.aio.server(interceptors=interceptors, options=fleet_options(self._caps.fleet))
        settings = self._settings
        service = FleetService(
            self._dispatcher, heartbeat_s=settings.heartbeat_s, node_timeout_s=settings.node_timeout_s
        )
        server.add_generic_rpc_handlers((service.handler(),))
        self._serve_api_servers(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)  # here clients cannot crowd it out
        most = self._caps.fleet
        return GrpcPort(FLEET, server, keys, self._sheds, max_connections=most, max_per_peer=most)

    async def _supervise(self) -> None:
        """Run the periodic work of the dispatcher, the overview, the health service and the certificates."""
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
            await self._public.report()
            self._api_servers.tell()


def _traces(settings: CoordinatorSettings) -> "Traces | None":
    if not settings.otlp_endpoint:
        return None
    from coordinator.traces.export import Traces

    return Traces(settings.otlp_endpoint)
