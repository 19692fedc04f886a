"""Provide the TLS configuration of the coordinator's ports, reloaded when its files change."""

import logging
import ssl
from collections.abc import Iterable
from typing import Any, Final

import grpc

from serving_core.net.tls import Pems, TlsError, TlsFiles, read_tls

logger = logging.getLogger(__name__)

HTTP: Final = ("http/1.1",)
HTTP2: Final = ("h2",)

Kind = tuple[tuple[str, ...], bool]
"""Kind of a port: its ALPN protocols, and whether it asks every client for a certificate of the CA."""


class ServerTls:
    """Hold the server certificate, and the CA of client certificates.

    Open connections keep their configuration; later connections use what `refresh` has loaded. Raises
    TlsError when the files cannot be used at the start.
    """

    def __init__(self, files: TlsFiles, *, verifies_clients: bool) -> None:
        self._files = files
        self._verifies_clients = verifies_clients
        self._stamps = files.stamps()
        self._pems, self._newest = self._read([(HTTP, verifies_clients)])

    def refresh(self) -> None:
        """Reload the certificate, key and CA if their files have changed; call it periodically. Raises nothing.

        Files that cannot be used together, as while they are being replaced, are logged and not loaded.
        """
        if (stamps := self._files.stamps()) == self._stamps:
            return
        self._stamps = stamps
        try:
            self._pems, self._newest = self._read(self._newest)
        except TlsError as error:
            logger.warning("the certificate stays what it was: %s", error)
        else:
            logger.info("new connections get the certificate that has come")

    def grpc_credentials(self, *, verifies: bool) -> grpc.ServerCredentials:
        """Return credentials for a gRPC port; each handshake uses the newest configuration.

        With `verifies`, the port asks every client for a certificate of the CA.
        """
        in_use = self._pems

        def fetch() -> Any:
            """Return the configuration of the next handshake, or None if unchanged. Runs in gRPC's threads."""
            nonlocal in_use
            newest = self._pems
            if newest is in_use:
                return None
            in_use = newest
            return _configuration(newest, verifies)

        return grpc.dynamic_ssl_server_credentials(_configuration(in_use, verifies), fetch, verifies)

    def http_context(self) -> ssl.SSLContext:
        """Return a context for an HTTP/1.1 port; each handshake uses the newest configuration.

        The port asks for client certificates if the constructor was given `verifies_clients`.
        """
        return self._following((HTTP, self._verifies_clients))

    def http2_context(self, *, verifies: bool) -> ssl.SSLContext:
        """Return a context for an HTTP/2 port; each handshake uses the newest configuration.

        With `verifies`, the port asks every client for a certificate of the CA.
        """
        return self._following((HTTP2, verifies))

    def _following(self, kind: Kind) -> ssl.SSLContext:
        context = self._context(kind)
        self._newest.setdefault(kind, context)

        def take_newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._newest[kind]

        context.sni_callback = take_newest  # called for every client, with or without a server name
        return context

    def _read(self, kinds: Iterable[Kind]) -> tuple[Pems, dict[Kind, ssl.SSLContext]]:
        return read_tls(self._files), {kind: self._context(kind) for kind in kinds}

    def _context(self, kind: Kind) -> ssl.SSLContext:
        protocols, verifies = kind
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(protocols)
        try:
            context.load_cert_chain(self._files.cert, self._files.key)
            if verifies:
                context.load_verify_locations(self._files.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # includes ssl.SSLError: the files have changed since they were read
            raise TlsError(f"the TLS files do not fit together: {error.strerror}") from error
        return context


def _configuration(pems: Pems, verifies: bool) -> Any:
    assert pems.key is not None
    assert pems.cert is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca if verifies else None)
