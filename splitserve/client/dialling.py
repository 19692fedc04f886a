"""Connect a client to its server: HOST:PORT, https://HOST:PORT for TLS, or http://HOST:PORT explicitly without."""

from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from serving_core.errors import SettingsError
from serving_core.net.channels import NO_PROXY, Option, channel_credentials
from serving_core.net.ports import is_on_this_machine
from serving_core.net.tls import SCHEME, TlsError, TlsFiles

WITHOUT_TLS: Final = "http://"
TARGET_NAME: Final = "grpc.ssl_target_name_override"


@dataclass(frozen=True, slots=True)
class Dialling:
    """Address of a server in gRPC's form, and its TLS files; None without TLS.

    Connections use the proxy from the environment, except to this machine.
    """

    address: str
    tls: TlsFiles | None = None
    server_name: str = ""  # the name that the certificate must be for; empty: the host of the address

    @classmethod
    def of(cls, target: str, tls: TlsFiles, server_name: str = "") -> "Dialling":
        """Parse HOST:PORT, with https:// for TLS or http:// for none; a CA in `tls` selects TLS too.

        `server_name` is the name that the certificate must be for; empty: the host. Raises SettingsError for an invalid
        address, and TlsError for certificate files without TLS.
        """
        if not isinstance(target, str) or not target.removeprefix(SCHEME).removeprefix(WITHOUT_TLS).strip("/ "):
            raise SettingsError(f"a server is HOST:PORT or {SCHEME}HOST:PORT, not {target!r}")
        if target.startswith(WITHOUT_TLS):
            if tls.ca:
                raise TlsError(f"--tls-ca is for a server over TLS, which {target} is not")
            target = target.removeprefix(WITHOUT_TLS).rstrip("/")
        if not target.startswith(SCHEME) and not tls.ca:
            if tls.cert or tls.key:
                raise TlsError(f"--tls-cert is for a server over TLS, which {SCHEME}{target} or --tls-ca would be")
            return cls(target)
        return cls(target.removeprefix(SCHEME).rstrip("/"), tls, server_name)

    def __str__(self) -> str:
        return self.address if self.tls is None else f"{SCHEME}{self.address}"

    def channel(self, options: tuple[Option, ...]) -> grpc.Channel:
        """Return a gRPC channel for blocking code, with these options added. Raises TlsError for an unusable file."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=self._completed(options))
        return grpc.secure_channel(self.address, channel_credentials(self.tls), options=self._completed(options))

    def aio_channel(self, options: tuple[Option, ...]) -> grpc.aio.Channel:
        """Return a gRPC channel for asyncio, with these options added. Raises TlsError for an unusable file."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=self._completed(options))
        return grpc.aio.secure_channel(self.address, channel_credentials(self.tls), options=self._completed(options))

    def _completed(self, options: tuple[Option, ...]) -> tuple[Option, ...]:
        if self.server_name:
            options = (*options, (TARGET_NAME, self.server_name))
        return (*options, NO_PROXY) if is_on_this_machine(self.address.rpartition(":")[0]) else options
