"""Authenticate and encrypt ZeroMQ connections by CURVE, with keys that are made at start.

A Listener that is reached over a network gives its address with its key, curve://HOST:PORT/KEY, which travels in
descriptors. It accepts the keys that the coordinator has announced.
"""

import logging
import re
from collections.abc import Iterable
from typing import Final

import zmq
from zmq.utils import z85

from kv_transfer.results import TransferError
from kv_transfer.transports import zap
from kv_transfer.transports.connection_key import show_key
from kv_transfer.wire import MAX_PAYLOAD_BYTES

logger = logging.getLogger(__name__)

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

    def guard(self, router: "zmq.Socket[bytes]", context: zap.Context) -> "zmq.Socket[bytes]":
        """Protect a Listener's socket before it binds. Return the socket whose messages go to `answer`."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES + OVERHEAD_BYTES)
        return zap.open_gate(router, context)

    def answer(self, questions: "zmq.Socket[bytes]", parts: list[zmq.Frame]) -> None:
        """Decide whether a connection is accepted."""
        question = zap.read_question(parts)
        is_known = question.mechanism == b"CURVE" and question.credentials[0] in self._allowed
        if not is_known:
            self._note_stranger()
        zap.answer(questions, question, may_come_in=is_known)

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
