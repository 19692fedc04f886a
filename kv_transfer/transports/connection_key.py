"""Protect unencrypted ZeroMQ connections with a key that is checked before any data is kept.

A Listener draws the key. The key travels in descriptors, as part of the address, so that only holders of a descriptor
can connect. It is the password of ZeroMQ's PLAIN mechanism. An eavesdropper on the network can read the key, as it can
read the blocks.
"""

import logging
import secrets
import time
from collections.abc import Iterable
from typing import Final

import zmq

from kv_transfer.results import TransferError
from kv_transfer.transports import zap
from serving_core.net.backoff import Reminder

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 16

_USER: Final = b"sender"
_REFUSED: Final = "a connection without the key of a descriptor was refused"


class ConnectionKey:
    """Require the key of every connection to a Listener."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(KEY_BYTES)
        self._reminder = Reminder()

    def allow(self, keys: Iterable[bytes]) -> list[bytes]:
        """Do nothing, and return no keys: the descriptor's key is enough."""
        return []

    def guard(self, router: "zmq.Socket[bytes]", context: zap.Context) -> "zmq.Socket[bytes]":
        """Protect a Listener's socket before it binds. Return the socket whose messages go to `answer`."""
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        return zap.open_gate(router, context)

    def answer(self, questions: "zmq.Socket[bytes]", parts: list[zmq.Frame]) -> None:
        """Decide whether a connection is accepted."""
        question = zap.read_question(parts)
        is_known = secrets.compare_digest(question.credentials[-1], self._key.encode())
        zap.answer(questions, question, may_come_in=is_known)
        if not is_known and self._reminder.is_due(_REFUSED, time.monotonic()):
            logger.warning(_REFUSED)

    def address_of(self, endpoint: str) -> str:
        """Return the address of a guarded Listener: ENDPOINT#KEY."""
        return f"{endpoint}#{self._key}"


def show_key(dealer: "zmq.Socket[bytes]", address: str) -> str:
    """Set the key on a Dialer's socket, and return the endpoint to connect to. Raises TransferError."""
    endpoint, separator, key = address.rpartition("#")
    if not separator or len(key) != 2 * KEY_BYTES or not key.isascii() or not key.isalnum():
        raise TransferError("the descriptor's address cannot be dialled")
    dealer.setsockopt(zmq.PLAIN_USERNAME, _USER)
    dealer.setsockopt(zmq.PLAIN_PASSWORD, key.encode())
    return endpoint
