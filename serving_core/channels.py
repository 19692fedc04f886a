"""gRPC options of every channel and server here. What each one prevents is in the comments beside it."""

from typing import Final

import grpc

from serving_core.errors import SettingsError
from serving_core.ports import before_port
from serving_core.tls import TlsFiles, read_tls

Option = tuple[str, int | str]


def _keepalive(time_s: int, timeout_s: int) -> tuple[Option, ...]:
    """Detects a hung process or a cut link within the sum. ping_timeout_ms is the one that bounds detection:
    keepalive_timeout_ms alone leaves a stopped peer undetected for a minute."""
    return (
        ("grpc.keepalive_time_ms", 1000 * time_s),
        ("grpc.keepalive_timeout_ms", 1000 * timeout_s),
        ("grpc.http2.ping_timeout_ms", 1000 * timeout_s),
        ("grpc.http2.max_pings_without_data", 0),
    )


# Heartbeats and their acknowledgements find what stands still much earlier, and know how slow the other side is: this
# ends connections that hang beside them.
_IN_FLEET: Final = _keepalive(10, 20)

# Not for clients: a server that is too busy to shake hands at once would be one that does not answer, deadline or not.
_WITHOUT_CALLS: Final[Option] = ("grpc.keepalive_permit_without_calls", 1)

# Clients are far away: the network, or a process of a busy machine, may stand still for some seconds. An answer under
# way is worth more than to know soon that nobody reads it, and to ask again for one costs more than to wait a little.
_TO_CLIENTS: Final = _keepalive(10, 10)
_TO_SERVERS: Final = _keepalive(2, 6)

# Whatever the environment says of proxies, which are for what is far away.
NO_PROXY: Final[Option] = ("grpc.enable_http_proxy", 0)

_CALLS: Final[tuple[Option, ...]] = (("grpc.max_receive_message_length", 16 * 2**20), ("grpc.enable_retries", 1))

CLIENT_OPTIONS: Final = (*_TO_SERVERS, *_CALLS)
FLEET_CHANNEL_OPTIONS: Final[tuple[Option, ...]] = (*_IN_FLEET, *_CALLS, _WITHOUT_CALLS, NO_PROXY)

_SHARES_PORT: Final = "grpc.so_reuseport"

# Without the ping settings a server ends healthy idle streams whose clients keep alive ("too_many_pings").
SERVER_OPTIONS: Final[tuple[Option, ...]] = (
    *_IN_FLEET,
    _WITHOUT_CALLS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 4096),
    # Beyond 1000 calls that wait for this process gRPC would drop some, as a CANCELLED without a reason.
    ("grpc.server.max_pending_requests", 4096),
    ("grpc.server.max_pending_requests_hard_limit", 8192),
    # Whoever connects speaks HTTP/2 soon, and has a call now and then, or makes room for others.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 60_000),
    (_SHARES_PORT, 0),  # a port in use is an error, not a second server that shares it
)

# Between processes of one coordinator, which trust each other: a batch has what is bounded elsewhere.
LOCAL_OPTIONS: Final[tuple[Option, ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)

MAX_CONNECTION_AGE_S: Final = 3600.0


def public_options(max_connections: int, *, longest_call_s: float, shares_port: bool = False) -> tuple[Option, ...]:
    """Of the server that clients dial. A connection that has become old takes no more calls, and those under way end
    before it does. Servers of this user may share a port, if they all say so."""
    return (
        *{**dict(SERVER_OPTIONS), **dict(_TO_CLIENTS), _SHARES_PORT: int(shares_port)}.items(),
        ("grpc.max_receive_message_length", 4 * 2**20),
        ("grpc.max_allowed_incoming_connections", max_connections),  # further ones are closed at once
        ("grpc.max_connection_age_ms", round(1000 * MAX_CONNECTION_AGE_S)),
        ("grpc.max_connection_age_grace_ms", round(1000 * longest_call_s)),
    )


def fleet_options(max_connections: int) -> tuple[Option, ...]:
    """Of the server that nodes dial, each for as long as it lives. Prompts travel inside the fleet as token ids: a
    public request of 4 MiB may become a larger command."""
    return (
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", 16 * 2**20),
        ("grpc.max_allowed_incoming_connections", max_connections),
    )


def listen(server: grpc.aio.Server, host: str, port: int, tls: grpc.ServerCredentials | None = None) -> int:
    """Has the server listen there, and gives the port; 0 takes a free one. Raises SettingsError."""
    address = f"{before_port(host)}:{port}"
    try:
        return server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
    except RuntimeError as error:
        message = f"cannot listen on {address}: port {port} is in use, or {host} is not an address of this machine"
        raise SettingsError(message) from error


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For a channel over TLS; where no CA is named, gRPC's own count. Raises TlsError."""
    pems = read_tls(files)
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


# ---- what gRPC's words for a connection that did not come about mean, where TLS is in question ----

_LEAVES: Final = "what listens there hangs up in the handshake: it may ask for a certificate of its CA (--tls-cert)"
_HUNG_UP: Final = ("Socket closed", "Connection reset", "Broken pipe")  # which of them is a matter of moments
_OVER_TLS: Final = (  # the first that fits counts
    ("certificate has expired", "the certificate that is shown there has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "the certificate that is shown there is of no CA that is known here: see --tls-ca"),
    ("Hostname Verification", "the certificate that is shown there is for other names than the one that was dialled"),
    ("WRONG_VERSION_NUMBER", "what listens there does not speak TLS"),
    *((words, _LEAVES) for words in _HUNG_UP),
)
_HANGS_UP: Final = "what listens there hangs up at once, as a TLS port does"
_IN_THE_OPEN: Final = tuple((words, _HANGS_UP) for words in _HUNG_UP)


def why_no_handshake(details: str, *, over_tls: bool) -> str | None:
    """What is wrong with whoever was dialled; None where it is not a matter of TLS."""
    return next((what for words, what in (_OVER_TLS if over_tls else _IN_THE_OPEN) if words in details), None)
