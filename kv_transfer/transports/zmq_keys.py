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


class Question(NamedTuple):
    """Hold one authentication request: a mechanism of ZeroMQ and its credentials."""

    request_id: bytes
    mechanism: bytes
    credentials: list[bytes]


def open_gate(router: "zmq.Socket[bytes]", context: Context) -> "zmq.Socket[bytes]":
    """Return the socket on which authentication requests arrive.

    Call before a Listener binds its socket. Without replies no connection is accepted.
    """
    questions = context.socket(zmq.REP)
    questions.setsockopt(zmq.LINGER, 0)
    questions.bind(_ZAP_ADDRESS)
    router.setsockopt(zmq.ZAP_DOMAIN, b"kv")
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return questions


def read_question(parts: Sequence[zmq.Frame]) -> Question:
    """Return a received authentication request."""
    _version, request_id, _domain, _address, _identity, mechanism, *credentials = (part.bytes for part in parts)
    return Question(request_id, mechanism, credentials)


def send_verdict(questions: "zmq.Socket[bytes]", question: Question, *, may_come_in: bool) -> None:
    """Send the verdict."""
    status = _OK if may_come_in else _DENIED
    questions.send_multipart([_VERSION, question.request_id, status, b"", b"", b""], zmq.NOBLOCK)


logger = logging.getLogger(__name__)

CONNECTION_KEY_BYTES: Final = 16

_USER: Final = b"sender"
_REFUSED: Final = "a connection without the key of a descriptor was refused"


class ConnectionKey:
    """Require the key of every connection to a Listener."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(CONNECTION_KEY_BYTES)
        self._reminder = Reminder()

    def allow(self, keys: Iterable[bytes]) -> list[bytes]:
        """Do nothing, and return no keys: the descriptor's key is enough."""
        return []

    def guard(self, router: "zmq.Socket[bytes]", context: Context) -> "zmq.Socket[bytes]":
        """Protect a Listener's socket before it binds. Return the socket whose messages go to `answer`."""
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        return open_gate(router, context)

    def answer(self, questions: "zmq.Socket[bytes]", parts: list[zmq.Frame]) -> None:
        """Decide whether a connection is accepted."""
        question = read_question(parts)
        is_known = secrets.compare_digest(question.credentials[-1], self._key.encode())
        send_verdict(questions, question, may_come_in=is_known)
        if not is_known and self._reminder.is_due(_REFUSED, time.monotonic()):
            logger.warning(_REFUSED)

    def address_of(self, endpoint: str) -> str:
        """Return the address of a guarded Listener: ENDPOINT#KEY."""
        return f"{endpoint}#{self._key}"


def show_key(dealer: "zmq.Socket[bytes]", address: str) -> str:
    """Set the key on a Dialer's socket, and return the endpoint to connect to. Raises TransferError."""
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
    """Hold one rank's key pair, in memory only, and the public keys that may connect."""

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        self.public, self._secret = z85.decode(public), z85.decode(secret)
        self._allowed: dict[bytes, None] = {}  # in order of arrival
        self._num_strangers = 0

    def allow(self, keys: Iterable[bytes]) -> list[bytes]:
        """Allow these keys, and return the new ones. Above MAX_KEYS the oldest keys are dropped."""
        new = [key for key in dict.fromkeys(keys) if len(key) == KEY_BYTES and key not in self._allowed]
        self._allowed.update(dict.fromkeys(new))
        while len(self._allowed) > MAX_KEYS:
            del self._allowed[next(iter(self._allowed))]
        return new

    def guard(self, router: "zmq.Socket[bytes]", context: Context) -> "zmq.Socket[bytes]":
        """Protect a Listener's socket before it binds. Return the socket whose messages go to `answer`."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES + OVERHEAD_BYTES)
        return open_gate(router, context)

    def answer(self, questions: "zmq.Socket[bytes]", parts: list[zmq.Frame]) -> None:
        """Decide whether a connection is accepted."""
        question = read_question(parts)
        is_known = question.mechanism == b"CURVE" and question.credentials[0] in self._allowed
        if not is_known:
            self._note_stranger()
        send_verdict(questions, question, may_come_in=is_known)

    def _note_stranger(self) -> None:
        """Log unknown keys at counts that are powers of two."""
        self._num_strangers += 1
        if self._num_strangers.bit_count() == 1:
            logger.warning("%d times somebody dialled with an unknown key, and was sent away", self._num_strangers)

    def address_of(self, endpoint: str) -> str:
        """Return the address of a guarded Listener on a tcp:// endpoint."""
        return f"curve://{endpoint.removeprefix('tcp://')}/{self.public.hex()}"

    def prepare(self, dealer: "zmq.Socket[bytes]", address: str) -> str:
        """Set the keys on a Dialer's socket, and return the endpoint to connect to. Raises TransferError."""
        if not address.startswith("curve://"):
            return show_key(dealer, address)
        if (match := _ADDRESS.fullmatch(address)) is None:
            raise TransferError("the descriptor's address cannot be dialled")
        dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(match["key"]))
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        return f"tcp://{match['place']}"
