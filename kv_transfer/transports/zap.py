"""Authenticate connections to a ZeroMQ Listener by ZAP (RFC 27), at a fixed address in its context."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq

_ADDRESS: Final = "inproc://zeromq.zap.01"
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
    questions.bind(_ADDRESS)
    router.setsockopt(zmq.ZAP_DOMAIN, b"kv")
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return questions


def read_question(parts: Sequence[zmq.Frame]) -> Question:
    """Return a received authentication request."""
    _version, request_id, _domain, _address, _identity, mechanism, *credentials = (part.bytes for part in parts)
    return Question(request_id, mechanism, credentials)


def answer(questions: "zmq.Socket[bytes]", question: Question, *, may_come_in: bool) -> None:
    """Send the verdict."""
    status = _OK if may_come_in else _DENIED
    questions.send_multipart([_VERSION, question.request_id, status, b"", b"", b""], zmq.NOBLOCK)
