"""gRPC options of every channel and server here. What each one prevents is in the comments beside it."""

from typing import Final

Option = tuple[str, int | str]

# Detects a hung process or a cut link within 4 s. ping_timeout_ms is the one that bounds detection:
# keepalive_timeout_ms alone leaves a stopped peer undetected for a minute.
_KEEPALIVE: Final[tuple[Option, ...]] = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: Final[tuple[Option, ...]] = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.enable_retries", 1),
)

# Without the ping settings a server ends healthy idle streams whose clients keep alive ("too_many_pings").
SERVER_OPTIONS: Final[tuple[Option, ...]] = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 4096),
    # Beyond 1000 calls that wait for this process gRPC would drop some, as a CANCELLED without a reason.
    ("grpc.server.max_pending_requests", 4096),
    ("grpc.server.max_pending_requests_hard_limit", 8192),
    ("grpc.max_receive_message_length", 4 * 2**20),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server that shares it
)

# Prompts travel inside the fleet as token ids: a public request of 4 MiB may become a larger command.
FLEET_OPTIONS: Final[tuple[Option, ...]] = (
    *SERVER_OPTIONS[:-2],
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.so_reuseport", 0),
)
