"""Run one API server: `python -m coordinator.api`.

API servers that a coordinator starts end with it. One that is started by itself outlives coordinators: it waits for one
at the fleet address, and resumes the calls there that an earlier coordinator has begun.
"""

import asyncio
import os
import signal
import socket

import grpc
from google.protobuf.message import Message

from coordinator.api.health import HealthService
from coordinator.api.public import STOP_GRACE_S, Behind, PublicApi
from coordinator.api.remote import ForwardedAdmin, ForwardedStatus, RemoteControl, asked
from coordinator.api.statuses import from_status
from coordinator.api.tls import ServerTls
from coordinator.api_server_settings import ApiServerSettings
from coordinator.served_model import read_served_model
from coordinator.settings import check_settings
from protos import api_servers_pb2, api_servers_pb2_grpc, inference_pb2, inference_pb2_grpc
from serving_core.flags import settings_command
from serving_core.net.channels import API_SERVER_OPTIONS, channel_credentials
from serving_core.net.descriptors import kept_spares
from serving_core.process.heap import collect_seldom
from serving_core.process.run import ending_signals, run_process
from serving_core.tasks import first_to_end

TLS_LOOK_S = 0.25


def run(settings: ApiServerSettings) -> None:
    """Serve the public API until the coordinator that started this API server ends its stream, or until a signal.

    An API server that a coordinator started ignores SIGINT, SIGTERM and SIGHUP, which the coordinator handles for it.
    Exits with code 2 and a one-sentence message when the settings are wrong or the API server cannot listen.
    """
    if settings.api_server_number:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the coordinator gets them and ends this server
            signal.signal(number, signal.SIG_IGN)
    name = f"coordinator.{settings.api_server_number}" if settings.api_server_number else "api server"
    run_process("coordinator", name, settings.served.log, lambda: _serve(settings))


async def _serve(settings: ApiServerSettings) -> None:
    async with kept_spares(), _channel(settings) as channel:
        await ApiServer(settings, channel).run()


def _channel(settings: ApiServerSettings) -> grpc.aio.Channel:
    """Return a channel to the coordinator. Raises TlsError when the TLS files cannot be used."""
    tls = settings.served.tls
    if settings.api_server_number or not tls.tls_ca:
        return grpc.aio.insecure_channel(settings.coordinator, options=API_SERVER_OPTIONS)
    return grpc.aio.secure_channel(settings.coordinator, channel_credentials(tls.files), options=API_SERVER_OPTIONS)


class ApiServer:
    """Serve the public API and keep the stream to the coordinator."""

    def __init__(self, settings: ApiServerSettings, channel: grpc.aio.Channel) -> None:
        self._settings = given = settings.served
        self._is_child = bool(settings.api_server_number)
        if not self._is_child:
            check_settings(given)
        self._metadata = (("authorization", f"Bearer {given.fleet_secret}"),) if given.fleet_secret else ()
        self._stub = api_servers_pb2_grpc.ApiServersStub(channel)
        self._admin = inference_pb2_grpc.AdminStub(channel)
        self._control = RemoteControl(
            self._stub,
            str(settings.api_server_number) if self._is_child else f"{socket.gethostname()}-{os.getpid()}",
            metadata=self._metadata,
            stream_interval=given.stream_interval,
        )
        self._tls = (
            ServerTls(given.tls.files, verifies_clients=given.tls_verify_clients) if given.tls.files.cert else None
        )
        self._forwarded = ForwardedAdmin(self._admin, self._metadata, has_admin_key=bool(given.admin_key))
        behind = Behind(
            control=self._control,
            status=ForwardedStatus(inference_pb2_grpc.InferenceStub(channel), self._metadata),
            admin=self._forwarded,
            metrics=self._metrics,
            overview=self._overview,
            change_adapters=self._change_adapters,
            count_call=self._control.count_call,
            sheds=self._control.sheds,
        )
        self._public = PublicApi(given, read_served_model(given), behind, self._tls, HealthService())
        if given.api_keys_file:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._public.reread_api_keys)

    async def run(self) -> None:
        """Serve until the coordinator ends the stream of an API server that it started, or until a signal; then close.

        Raises whatever ended the stream or the public API early, SettingsError for a port that cannot be opened among
        them.
        """
        attached = self._control.run() if self._is_child else self._control.run_again()
        serving = asyncio.create_task(first_to_end(attached, self._open()))
        stopping = asyncio.create_task(self._stopping())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._public.stop(STOP_GRACE_S if self._is_child else self._settings.drain_s)
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
        if not serving.cancelled():
            serving.result()

    async def _stopping(self) -> None:
        """Return at a signal that ends this API server. One that the coordinator has started ignores signals."""
        stopping = asyncio.Event()
        if not self._is_child:
            for number in ending_signals():
                asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        await stopping.wait()

    async def _open(self) -> None:
        await self._control.changed.wait()  # a coordinator has answered, or none is there
        await self._public.report()
        if self._settings.api_keys_file:
            self._public.reread_api_keys()  # the keys may have changed before this server could be told
        self._public.listen()
        await self._public.start()
        collect_seldom()
        self._control.opened()
        while True:
            await self._changed()
            await self._public.report()
            if self._tls is not None:
                self._tls.refresh()

    async def _changed(self) -> None:
        """Apply a change of the fleet, or return after TLS_LOOK_S to check the certificates."""
        try:
            async with asyncio.timeout(TLS_LOOK_S):
                await self._control.changed.wait()
        except TimeoutError:
            return
        self._control.changed.clear()

    async def _metrics(self) -> bytes:
        response = await asked(self._stub.Metrics, api_servers_pb2.MetricsRequest(), self._metadata)
        return bytes(response.text)

    async def _overview(self, after: int | None) -> inference_pb2.Overview:
        request = inference_pb2.GetOverviewRequest(after=after)
        overview: inference_pb2.Overview = await asked(self._admin.GetOverview, request, self._metadata)
        return overview

    async def _change_adapters(self, method: str, request: Message) -> None:
        try:
            await self._forwarded.change_adapters(method, request)
        except grpc.aio.AioRpcError as error:
            raise from_status(error) from error


if __name__ == "__main__":
    settings_command(ApiServerSettings, run, name="coordinator.api", help="One API server of a coordinator.")()
