"""Authenticate ZeroMQ connections before any data is kept: by the key of a descriptor, or by CURVE, which encrypts too.

ZeroMQ asks by ZAP (RFC 27), at a fixed address in a Listener's context.

Without encryption a Listener draws a key, the password of ZeroMQ's PLAIN mechanism. The key travels in descriptors, as
part of the address, so that only holders of a descriptor can connect. An eavesdropper on the network can read the key,
as it can read the blocks.

With CURVE a Listener gives its address with its public key, curve://HOST:PORT/KEY, which travels in descriptors too. It
accepts the keys that the coordinator has announced.
"""

import logging
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from kv_transfer.results import TransferError
from kv_transfer.wire import MAX_PAYLOAD_BYTES
from serving_core.net.backoff import Reminder

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_OK, _DENIED = b"200", b"400"

Context = zmq.Context[zmq.Socket[bytes]]


class AuthRequest(NamedTuple):
    """An authentication request of ZeroMQ (ZAP): the mechanism, and the credentials of a connection."""

    request_id: bytes
    mechanism: bytes
    credentials: list[bytes]


def open_auth_socket(router: "zmq.Socket[bytes]", context: Context) -> "zmq.Socket[bytes]":
    """Return a new socket of `context` on which authentication requests for `router`, a Listener's socket, arrive.

    Call before the Listener binds its socket. Without replies no connection is accepted.
    """
    auth_socket = context.socket(zmq.REP)
    auth_socket.setsockopt(zmq.LINGER, 0)
    auth_socket.bind(_ZAP_ADDRESS)
    router.setsockopt(zmq.ZAP_DOMAIN, b"kv")
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return auth_socket


def read_auth_request(parts: Sequence[zmq.Frame]) -> AuthRequest:
    """Return the authentication request in the frames (`parts`) of a received message."""
    _version, request_id, _domain, _address, _identity, mechanism, *credentials = (part.bytes for part in parts)
    return AuthRequest(request_id, mechanism, credentials)


def send_auth_reply(auth_socket: "zmq.Socket[bytes]", request: AuthRequest, *, is_accepted: bool) -> None:
    """Reply on auth_socket to an authentication request: ZeroMQ accepts the connection or closes it."""
    status = _OK if is_accepted else _DENIED
    auth_socket.send_multipart([_VERSION, request.request_id, status, b"", b"", b""], zmq.NOBLOCK)


logger = logging.getLogger(__name__)

CONNECTION_KEY_BYTES: Final = 16

_USER: Final = b"sender"
_REFUSED: Final = "a connection without the key of a descriptor was refused"


class ConnectionKey:
    """Requires a random key, which travels in descriptors, of every connection to a Listener."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(CONNECTION_KEY_BYTES)
        self._reminder = Reminder()

    def allow(self, keys: Iterable[bytes]) -> list[bytes]:
        """Do nothing, and return no keys: the descriptor's key is enough."""
        return []

    def guard(self, router: "zmq.Socket[bytes]", context: Context) -> "zmq.Socket[bytes]":
        """Require the key of every connection to `router`, a Listener's socket; return the socket of the requests.

        Call before `router` binds, once for each `context`, to which the new socket belongs. Give each message that
        arrives on it to `authenticate`: no connection is accepted without a reply.
        """
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        return open_auth_socket(router, context)

    def authenticate(self, auth_socket: "zmq.Socket[bytes]", parts: list[zmq.Frame]) -> None:
        """Reply on auth_socket to the request in these frames (`parts`): accept the connection if it has the key."""
        request = read_auth_request(parts)
        is_known = secrets.compare_digest(request.credentials[-1], self._key.encode())
        send_auth_reply(auth_socket, request, is_accepted=is_known)
        if not is_known and self._reminder.is_due(_REFUSED, time.monotonic()):
            logger.warning(_REFUSED)

    def address_of(self, endpoint: str) -> str:
        """Return the address of a Listener on this endpoint, for descriptors: ENDPOINT#KEY."""
        return f"{endpoint}#{self._key}"


def set_key(dealer: "zmq.Socket[bytes]", address: str) -> str:
    """Set the key of a descriptor's address (ENDPOINT#KEY) on `dealer`, a Dialer's socket; return the ENDPOINT.

    Raises TransferError for an address without a valid key.
    """
    endpoint, separator, key = address.rpartition("#")
    if not separator or len(key) != 2 * CONNECTION_KEY_BYTES or not key.isascii() or not key.isalnum():
        raise TransferError("the descriptor's address cannot be dialled")
    dealer.setsockopt(zmq.PLAIN_USERNAME, _USER)
    dealer.setsockopt(zmq.PLAIN_PASSWORD, key.encode())
    return endpoint


KEY_BYTES: Final = 32
MAX_KEYS: Final = 2**16  # of other ranks; as many as in the largest fleet
OVERHEAD_BYTES: Final = 64  # upper bound of what encryption adds to a frame

_ADDRESS: Final = re.compile(r"curve://(?P<place>[^/]+)/(?P<key>[0-9a-f]{64})")


class Keyring:
    """One rank's CURVE key pair, in memory only, and the public keys that may connect."""

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        self.public, self._secret = z85.decode(public), z85.decode(secret)
        self._allowed: dict[bytes, None] = {}  # in order of arrival
        self._num_strangers = 0

    def allow(self, keys: Iterable[bytes]) -> list[bytes]:
        """Allow Dialers with these public keys to connect; return the keys that are new.

        Keys of a wrong length are ignored. Above MAX_KEYS the oldest keys are dropped.
        """
        new = [key for key in dict.fromkeys(keys) if len(key) == KEY_BYTES and key not in self._allowed]
        self._allowed.update(dict.fromkeys(new))
        while len(self._allowed) > MAX_KEYS:
            del self._allowed[next(iter(self._allowed))]
        return new

    def guard(self, router: "zmq.Socket[bytes]", context: Context) -> "zmq.Socket[bytes]":
        """Protect `router`, a Listener's socket, before it binds; return the socket of authentication requests.

        It belongs to `context`, and its messages go to `authenticate`.
        """
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES + OVERHEAD_BYTES)
        return open_auth_socket(router, context)

    def authenticate(self, auth_socket: "zmq.Socket[bytes]", parts: list[zmq.Frame]) -> None:
        """Reply on auth_socket to the request in these frames (`parts`): accept the connection of an allowed key."""
        request = read_auth_request(parts)
        is_known = request.mechanism == b"CURVE" and request.credentials[0] in self._allowed
        if not is_known:
            self._note_stranger()
        send_auth_reply(auth_socket, request, is_accepted=is_known)

    def _note_stranger(self) -> None:
        """Log unknown keys at counts that are powers of two."""
        self._num_strangers += 1
        if self._num_strangers.bit_count() == 1:
            logger.warning("%d times somebody dialled with an unknown key, and was sent away", self._num_strangers)

    def address_of(self, endpoint: str) -> str:
        """Return the address of a Listener on this tcp:// endpoint, for descriptors: curve://HOST:PORT/KEY."""
        return f"curve://{endpoint.removeprefix('tcp://')}/{self.public.hex()}"

    def prepare(self, dealer: "zmq.Socket[bytes]", address: str) -> str:
        """Set the keys for a Listener's address on `dealer`, a Dialer's socket; return the endpoint to connect to.

        An address that is not curve:// is handled by set_key. Raises TransferError for an invalid address.
        """
        if not address.startswith("curve://"):
            return set_key(dealer, address)
        if (match := _ADDRESS.fullmatch(address)) is None:
            raise TransferError("the descriptor's address cannot be dialled")
        dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(match["key"]))
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        return f"tcp://{match['place']}"
