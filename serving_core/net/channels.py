"""Define the gRPC options of every channel and server. The comments say what each option prevents."""

from typing import Final

import grpc

from serving_core.errors import SettingsError
from serving_core.net.ports import before_port
from serving_core.net.tls import TlsFiles, read_tls

Option = tuple[str, int | str]


def _keepalive(time_s: int, timeout_s: int) -> tuple[Option, ...]:
    """Return options that detect a hung process or a cut link within the sum of both times.

    ping_timeout_ms bounds the detection: keepalive_timeout_ms alone leaves a stopped peer undetected for a minute.
    """
    return (
        ("grpc.keepalive_time_ms", 1000 * time_s),
        ("grpc.keepalive_timeout_ms", 1000 * timeout_s),
        ("grpc.http2.ping_timeout_ms", 1000 * timeout_s),
        ("grpc.http2.max_pings_without_data", 0),
    )


# Heartbeats and their acknowledgements detect a hang much earlier, and adapt to a slow peer; these pings end other
# connections that hang.
_IN_FLEET: Final = _keepalive(10, 20)

# Not for clients: they would count a server that is too busy for a prompt handshake as not answering, whatever their
# deadline.
_WITHOUT_CALLS: Final[Option] = ("grpc.keepalive_permit_without_calls", 1)

# Clients are far away: the network, or a process of a busy machine, may pause for some seconds. Continuing a stream
# matters
# more than detecting a lost client early, and repeating a request costs more than waiting a little.
_TO_CLIENTS: Final = _keepalive(10, 10)
_TO_SERVERS: Final = _keepalive(2, 6)

# Ignores proxies in the environment, which are meant for remote hosts.
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
    # Beyond 1000 calls that wait for this process gRPC would drop some, as CANCELLED without a reason.
    ("grpc.server.max_pending_requests", 4096),
    ("grpc.server.max_pending_requests_hard_limit", 8192),
    # A connection must soon speak HTTP/2 and have a call now and then, or make room for others.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 60_000),
    (_SHARES_PORT, 0),  # a port in use is an error, not a second server that shares it
)

# From an API server to its coordinator, which trust each other: other limits bound the size of a batch. The window of
# HTTP/2, which does not grow without the probe, bounds the batches that the API server has yet to read.
API_SERVER_OPTIONS: Final[tuple[Option, ...]] = (
    *_IN_FLEET,
    _WITHOUT_CALLS,
    NO_PROXY,
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # finds a coordinator that starts, or a standby that takes over, soon
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
)

MAX_CONNECTION_AGE_S: Final = 3600.0


def public_options(max_connections: int, *, longest_call_s: float, shares_port: bool = False) -> tuple[Option, ...]:
    """Return the gRPC options of the server that clients connect to, at most `max_connections` at once.

    An old connection takes no more calls and closes after the running ones, each of which may take `longest_call_s`.
    Servers of this user may share a port if all of them set `shares_port`.
    """
    return (
        *{**dict(SERVER_OPTIONS), **dict(_TO_CLIENTS), _SHARES_PORT: int(shares_port)}.items(),
        ("grpc.max_receive_message_length", 4 * 2**20),
        ("grpc.max_allowed_incoming_connections", max_connections),  # further connections are closed at once
        ("grpc.max_connection_age_ms", round(1000 * MAX_CONNECTION_AGE_S)),
        ("grpc.max_connection_age_grace_ms", round(1000 * longest_call_s)),
    )


def fleet_options(max_connections: int) -> tuple[Option, ...]:
    """Return the gRPC options of the server that nodes connect to, at most `max_connections` at once.

    Prompts travel inside the fleet as token ids: a public request of 4 MiB may become a larger command.
    """
    return (
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", 16 * 2**20),
        ("grpc.max_allowed_incoming_connections", max_connections),
    )


def listen(server: grpc.aio.Server, host: str, port: int, tls: grpc.ServerCredentials | None = None) -> int:
    """Let the server listen on an address, and return the port; port 0 takes a free one.

    Without `tls` it is plain text. Raises SettingsError if the address cannot be used.
    """
    address = f"{before_port(host)}:{port}"
    try:
        return server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
    except RuntimeError as error:
        message = f"cannot listen on {address}: port {port} is in use, or {host} is not an address of this machine"
        raise SettingsError(message) from error


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Return the credentials of a client's channel over TLS; without a CA, gRPC's own CAs apply.

    Raises TlsError if a file cannot be used.
    """
    pems = read_tls(files)
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


# ---- meaning of gRPC's texts for failed connections, as far as TLS is concerned ----

_LEAVES: Final = "what listens there hangs up in the handshake: it may ask for a certificate of its CA (--tls-cert)"
_HUNG_UP: Final = ("Socket closed", "Connection reset", "Broken pipe")  # temporary failures
_OVER_TLS: Final = (  # the first match counts
    ("certificate has expired", "the certificate that is shown there has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "the certificate that is shown there is of no CA that is known here: see --tls-ca"),
    ("Hostname Verification", "the certificate that is shown there is for other names than the one that was dialled"),
    ("WRONG_VERSION_NUMBER", "what listens there does not speak TLS"),
    *((words, _LEAVES) for words in _HUNG_UP),
)
_HANGS_UP: Final = "what listens there hangs up at once, as a TLS port does"
_IN_THE_OPEN: Final = tuple((words, _HANGS_UP) for words in _HUNG_UP)


def why_no_handshake(details: str, *, over_tls: bool) -> str | None:
    """Return, in words, what is wrong with the peer of a failed connection; None if TLS is not the cause.

    `details` is gRPC's text, and `over_tls` whether the channel uses TLS.
    """
    return next((what for words, what in (_OVER_TLS if over_tls else _IN_THE_OPEN) if words in details), None)
