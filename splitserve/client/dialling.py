"""How a client dials its server: HOST:PORT, or https://HOST:PORT over TLS."""

from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from serving_core.channels import Option, channel_credentials
from serving_core.tls import SCHEME, TlsError, TlsFiles

TARGET_NAME: Final = "grpc.ssl_target_name_override"


@dataclass(frozen=True, slots=True)
class Dialling:
    """An address as gRPC takes it, and with what it is dialled over TLS; None without."""

    address: str
    tls: TlsFiles | None = None
    server_name: str = ""  # that the certificate must be for; empty: the one of the address

    @classmethod
    def of(cls, target: str, tls: TlsFiles, server_name: str = "") -> "Dialling":
        """TLS is what https:// asks for, or a CA. Raises TlsError for a certificate that is for nothing."""
        if not target.startswith(SCHEME) and not tls.ca:
            if tls.cert or tls.key:
                raise TlsError(f"--tls-cert is for a server over TLS, which {SCHEME}{target} or --tls-ca would be")
            return cls(target)
        return cls(target.removeprefix(SCHEME).rstrip("/"), tls, server_name)

    def __str__(self) -> str:
        return self.address if self.tls is None else f"{SCHEME}{self.address}"

    def channel(self, options: tuple[Option, ...]) -> grpc.Channel:
        """For plain code. Raises TlsError."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, channel_credentials(self.tls), options=self._named(options))

    def aio_channel(self, options: tuple[Option, ...]) -> grpc.aio.Channel:
        """For asyncio. Raises TlsError."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, channel_credentials(self.tls), options=self._named(options))

    def _named(self, options: tuple[Option, ...]) -> tuple[Option, ...]:
        return (*options, (TARGET_NAME, self.server_name)) if self.server_name else options
