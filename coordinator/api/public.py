"""Serve the public API: the gRPC server and the HTTP server that clients connect to."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from coordinator.api.authentication import ASKER, NO_ADMIN_KEY, NO_API_KEY, BearerAuthentication, BearerSecrets
from coordinator.api.connections import GRPC, SPARE, Caps, Sheds, connection_caps
from coordinator.api.control import Control
from coordinator.api.grpc_port import GrpcPort, add_reflection
from coordinator.api.health import INFERENCE, HealthService
from coordinator.api.http.app import ChangeAdapters, Metrics, make_app
from coordinator.api.http.middleware import CountCall
from coordinator.api.http.page import AskOverview, Page
from coordinator.api.http.serving import HttpServer
from coordinator.api.inference_service import InferenceService, Status
from coordinator.api.preprocess import Preprocessor, ServedModel
from coordinator.api.statuses import StatusInterceptor
from coordinator.api.tls import ServerTls
from coordinator.control.request_log import CallRecord
from coordinator.control.slo import parse_slo_classes
from coordinator.settings import CoordinatorSettings, api_keys, origins
from protos import inference_pb2, inference_pb2_grpc
from serving_core.errors import RequestError, SettingsError
from serving_core.net.channels import public_options
from serving_core.net.descriptors import num_descriptors
from serving_core.reasons import QUEUE_FULL

logger = logging.getLogger(__name__)

ADMIN: Final = inference_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
OPERATOR: Final = "operator"  # holder name of the admin key
IDLE_CONNECTIONS_PER_CALL: Final = 2
SPARE_CALLS: Final = 256  # beyond the sequences in flight: health watchers, status calls, refusals
STOP_GRACE_S: Final = 1.0
SETTLED_S: Final = 1.0  # after the start, until work begins that no client waits for
WARM_S: Final = 10.0  # after the health service reports SERVING, when local nodes have finished their start


@dataclass(frozen=True, slots=True)
class Behind:
    """Parts of control that an API server needs, in the same process or over a socket."""

    control: Control
    status: Status
    admin: Any  # an AdminServicer
    metrics: Metrics
    overview: AskOverview
    change_adapters: ChangeAdapters
    count_call: CountCall
    sheds: Sheds


class PublicApi:
    """Serve both ports of one API server, gRPC and HTTP. Must be created on a running event loop.

    Creating it raises SettingsError. Call `listen`, `start`, then `stop` in any case.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        model: ServedModel,
        behind: Behind,
        tls: ServerTls | None,
        health: HealthService,
    ) -> None:
        self._settings = settings
        self._behind = behind
        self._tls = tls
        self._preprocessor = Preprocessor(
            model,
            behind.control,
            max_logprobs=settings.max_logprobs,
            request_timeout_s=settings.request_timeout_s,
            strict_fields=settings.strict_fields,
            max_sequences=settings.max_num_queued_reqs,
            slo_classes=[each.name for each in parse_slo_classes(settings.slo_class)],
        )
        self._max_calls = settings.max_num_queued_reqs + SPARE_CALLS
        self._caps = caps(settings)
        self._health = health
        holders = self._key_holders()
        self._api_keys = BearerSecrets(holders) if holders else None
        self._admin_key = BearerSecrets({settings.admin_key: OPERATOR}) if settings.admin_key else None
        self._public = GrpcPort(
            GRPC,
            self._public_server(),
            self._api_keys,
            behind.sheds,
            max_connections=self._caps.public,
            max_per_peer=self._caps.per_peer,
        )
        self._http = self._http_server() if settings.http_port >= 0 else None
        self._serves = asyncio.Event()
        self._warming: asyncio.Task[None] | None = None
        self.port = 0  # set by `listen`
        self.http_port = -1  # set by `listen`; -1 without HTTP

    def listen(self) -> None:
        """Open both ports, and set `port` and `http_port` to their numbers.

        Raises SettingsError if a port cannot be used.
        """
        settings, tls = self._settings, self._tls
        shares, verifies = settings.api_server_count > 1, settings.tls_verify_clients
        self.port = self._public.listen(settings.host, settings.grpc_port, tls, verifies=verifies, shares_port=shares)
        if self._http is not None:
            self.http_port = self._http.listen(settings.http_host, settings.http_port, shares_port=shares)

    async def start(self) -> None:
        """Start to accept calls at the ports that `listen` has opened."""
        await self._public.start()
        if self._http is not None:
            await self._http.start()
        self._warming = asyncio.create_task(self._warm_up())

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Accept no new calls, and end those that still run after `grace_s`."""
        if self._warming is not None:
            self._warming.cancel()
        stopping = [self._public.stop(grace_s)]
        if self._http is not None:
            stopping.append(self._http.stop(grace_s))
        await asyncio.gather(*stopping)

    async def report(self) -> None:
        """Set the status of the health service to what control reports."""
        is_serving = self._behind.control.is_serving
        await self._health.report(is_serving=is_serving)
        if is_serving:
            self._serves.set()

    async def _warm_up(self) -> None:
        """Start what the first chat request and the first structured output would wait for.

        The grammar compiler reads the tokenizer, which takes seconds for a large vocabulary, so it starts last.
        """
        await asyncio.sleep(SETTLED_S)
        self._preprocessor.model.tokenizer.begin()
        await self._preprocessor.model.tokenizer.check()
        await self._serves.wait()
        await asyncio.sleep(WARM_S)
        self._preprocessor.model.structures.begin()

    def reread_api_keys(self) -> None:
        """Load the API keys from their file again, for later calls.

        Logs a warning and keeps the old keys if it cannot.
        """
        assert self._api_keys is not None, "there is no file of API keys"
        try:
            holders = self._key_holders()
        except SettingsError as error:
            logger.warning("the API keys stay what they were: %s", error)
        else:
            self._api_keys.replace(holders)
            logger.info("%d API keys are in force", len(holders))

    def _key_holders(self) -> dict[str, str]:
        """Return the holders by secret: those of the API keys, plus the operator. Empty when clients need no key."""
        holders, admin_key = api_keys(self._settings), self._settings.admin_key
        return {**holders, admin_key: OPERATOR} if holders and admin_key else holders

    def _public_server(self) -> grpc.aio.Server:
        places = Places(self._max_calls, self._preprocessor.noting_refusal)
        interceptors: list[grpc.aio.ServerInterceptor] = [StatusInterceptor(places.taken)]
        if self._api_keys is not None:
            interceptors.insert(0, BearerAuthentication(self._api_keys, NO_API_KEY))
        if self._admin_key is not None:
            interceptors.insert(0, BearerAuthentication(self._admin_key, NO_ADMIN_KEY, ADMIN))
        settings = self._settings
        server = grpc.aio.server(
            interceptors=interceptors,
            options=public_options(
                self._caps.public, longest_call_s=settings.request_timeout_s, shares_port=settings.api_server_count > 1
            ),
        )
        service = InferenceService(self._preprocessor, self._behind.status)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
        inference_pb2_grpc.add_AdminServicer_to_server(self._behind.admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection((INFERENCE, ADMIN, HEALTH), server)
        return server

    def _http_server(self) -> HttpServer:
        app = make_app(
            self._preprocessor,
            self._is_serving,
            self._behind.metrics,
            Page(self._behind.overview) if self._settings.ui else None,
            change_adapters=self._behind.change_adapters,
            count_call=self._behind.count_call,
            secrets=self._api_keys,
            admin_key=self._admin_key,
            allowed_origins=origins(self._settings.allowed_origins),
            max_calls=min(self._max_calls, self._caps.http - SPARE),
        )
        context = self._tls.http_context() if self._tls else None
        return HttpServer(
            app,
            self._behind.sheds,
            max_connections=self._caps.http,
            max_per_peer=self._caps.per_peer,
            tls=context,
        )

    async def _is_serving(self) -> bool:
        """Return whether the health service reports SERVING."""
        return self._health.is_serving


def caps(settings: CoordinatorSettings) -> Caps:
    """Return the connection caps of each API server, an equal share of the configured numbers, and of the fleet port.

    Raises SettingsError when a share is too small, or the limit on open files is.
    """
    api_servers, wanted, per_peer = (
        settings.api_server_count,
        settings.max_connections,
        settings.max_connections_per_peer,
    )
    if api_servers > 1 and wanted and wanted // api_servers <= SPARE:
        raise SettingsError(
            f"max_connections ({wanted}) is divided over {api_servers} API servers, each of which must get more than "
            f"{SPARE}"
        )
    return connection_caps(
        num_descriptors(),
        guards_clients=bool(api_keys(settings)),
        guards_nodes=bool(settings.fleet_secret),
        useful=IDLE_CONNECTIONS_PER_CALL * (settings.max_num_queued_reqs + SPARE_CALLS),
        wanted=wanted // api_servers,
        wanted_per_peer=max(1, per_peer // api_servers) if per_peer else 0,
    )


# ---- Limit of simultaneous gRPC calls of one API server ----


class Places:
    """Limit the number of simultaneous calls."""

    def __init__(self, most: int, noting_refusal: Callable[[CallRecord], AbstractContextManager[None]]) -> None:
        self._most = most
        self._noting_refusal = noting_refusal
        self._num_taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a call as running while the block runs.

        Raises RequestError with reason QUEUE_FULL before the block, reported as a refused call, if `most` calls are
        running.
        """
        if self._num_taken >= self._most:
            with self._noting_refusal(CallRecord("", ASKER.get())):
                raise RequestError(QUEUE_FULL, f"{self._num_taken} calls at once, the limit is {self._most}")
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1
