"""The key that a ZeroMQ connection shows before anything of it is kept, where it is not encrypted.

A Listener draws it. It travels in descriptors, as part of the address, so that only those who hold one get in. It is
the password of ZeroMQ's PLAIN mechanism. Whoever can read the network can read the key, as they can the blocks."""

import logging
import secrets
import time
from collections.abc import Iterable
from typing import Final

import zmq

from kv_transfer.results import TransferError
from kv_transfer.transports import zap
from serving_core.backoff import Reminder

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 16

_USER: Final = b"sender"
_REFUSED: Final = "a connection without the key of a descriptor was refused"


class ConnectionKey:
    """What a Listener asks for; whoever has it may dial."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(KEY_BYTES)
        self._reminder = Reminder()

    def allow(self, keys: Iterable[bytes]) -> list[bytes]:
        """Nobody has to be told of."""
        return []

    def guard(self, router: "zmq.Socket[bytes]", context: zap.Context) -> "zmq.Socket[bytes]":
        """Before a Listener binds its socket. What comes at the socket that this gives is for `answer`."""
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        return zap.open_gate(router, context)

    def answer(self, questions: "zmq.Socket[bytes]", parts: list[zmq.Frame]) -> None:
        """Whether somebody who dials may come in."""
        question = zap.read_question(parts)
        is_known = secrets.compare_digest(question.credentials[-1], self._key.encode())
        zap.answer(questions, question, may_come_in=is_known)
        if not is_known and self._reminder.is_due(_REFUSED, time.monotonic()):
            logger.warning(_REFUSED)

    def address_of(self, endpoint: str) -> str:
        """Where a guarded Listener is found: ENDPOINT#KEY."""
        return f"{endpoint}#{self._key}"


def show_key(dealer: "zmq.Socket[bytes]", address: str) -> str:
    """The endpoint that a Dialer's socket, made ready for it, is to connect to. Raises TransferError."""
    endpoint, separator, key = address.rpartition("#")
    if not separator or len(key) != 2 * KEY_BYTES or not key.isascii() or not key.isalnum():
        raise TransferError("the descriptor's address cannot be dialled")
    dealer.setsockopt(zmq.PLAIN_USERNAME, _USER)
    dealer.setsockopt(zmq.PLAIN_PASSWORD, key.encode())
    return endpoint
