"""Run one API server of a coordinator that has several: `python -m coordinator.api`.

The control process starts and ends this process.
"""

import asyncio
import signal

import grpc

from coordinator.api.health import HealthService
from coordinator.api.messages import ASKED
from coordinator.api.public import Behind, PublicApi
from coordinator.api.remote import ForwardedAdmin, ForwardedStatus, RemoteControl, asked
from coordinator.api.tls import ServerTls
from coordinator.api_server_settings import ApiServerSettings
from coordinator.served_model import read_served_model
from protos import api_servers_pb2, api_servers_pb2_grpc, inference_pb2, inference_pb2_grpc
from serving_core.flags import settings_command
from serving_core.net.channels import LOCAL_OPTIONS
from serving_core.net.descriptors import kept_spares
from serving_core.process.run import run_process
from serving_core.tasks import first_to_end

TLS_LOOK_S = 0.25


def run(settings: ApiServerSettings) -> None:
    """Serve until control ends the stream.

    Exits with code 2 and a one-sentence message when the API server cannot listen.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # control gets them and ends this server
        signal.signal(number, signal.SIG_IGN)
    name = f"coordinator.{settings.api_server_number}"
    run_process("coordinator", name, settings.coordinator.log, lambda: _serve(settings))


async def _serve(settings: ApiServerSettings) -> None:
    async with (
        kept_spares(),
        grpc.aio.insecure_channel(f"unix:{settings.control_socket}{ASKED}", options=LOCAL_OPTIONS) as channel,
    ):
        await ApiServer(settings, channel).run()


class ApiServer:
    """Serve the public API and keep the stream to control, which ends this server."""

    def __init__(self, settings: ApiServerSettings, channel: grpc.aio.Channel) -> None:
        self._settings = given = settings.coordinator
        self._stub = api_servers_pb2_grpc.ApiServersStub(channel)
        self._admin = inference_pb2_grpc.AdminStub(channel)
        self._control = RemoteControl(
            settings.control_socket, number=settings.api_server_number, stream_interval=given.stream_interval
        )
        self._tls = (
            ServerTls(given.tls.files, verifies_clients=given.tls_verify_clients) if given.tls.files.cert else None
        )
        behind = Behind(
            control=self._control,
            status=ForwardedStatus(inference_pb2_grpc.InferenceStub(channel)),
            admin=ForwardedAdmin(self._admin),
            metrics=self._metrics,
            overview=self._overview,
            count_call=self._control.count_call,
            sheds=self._control.sheds,
        )
        self._public = PublicApi(given, read_served_model(given), behind, self._tls, HealthService())
        if given.api_keys_file:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._public.reread_api_keys)

    async def run(self) -> None:
        """Serve until control has ended the stream and the ports are closed."""
        try:
            await first_to_end(self._control.run(), self._open())
        finally:
            await self._public.stop()

    async def _open(self) -> None:
        await self._control.changed.wait()  # the fleet's state is known
        await self._public.report()
        if self._settings.api_keys_file:
            self._public.reread_api_keys()  # the keys may have changed before this server could be told
        self._public.listen()
        await self._public.start()
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
        response = await asked(self._stub.Metrics, api_servers_pb2.MetricsRequest())
        return bytes(response.text)

    async def _overview(self, after: int | None) -> inference_pb2.Overview:
        request = inference_pb2.GetOverviewRequest(after=after)
        overview: inference_pb2.Overview = await asked(self._admin.GetOverview, request)
        return overview


if __name__ == "__main__":
    settings_command(ApiServerSettings, run, name="coordinator.api", help="One API server of a coordinator.")()
