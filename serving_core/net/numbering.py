"""Number the messages of a stream, and detect a lost, repeated or reordered one. Pure.

A live connection does not prove that each message has arrived: a process that shares its sockets may have read some.
"""

from typing import Protocol

from serving_core.errors import SplitServeError


class MessageLost(SplitServeError):
    """A message of a stream was lost: the sender's assumptions about the other side no longer hold."""


class _Message(Protocol):
    number: int


class Numbering:
    """Number the messages of one stream, at one end: from 1, in each direction."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._num_received = 0

    def stamp(self, message: _Message) -> None:
        """Set the number of the next message to send."""
        self._num_sent += 1
        message.number = self._num_sent

    def check(self, message: _Message) -> None:
        """Check the number of a received message. Raises MessageLost unless it follows the one before."""
        expected, number = self._num_received + 1, message.number
        if number == expected + 1:
            raise MessageLost(f"message {expected} was lost on the way")
        if number > expected:
            raise MessageLost(f"messages {expected} to {number - 1} were lost on the way")
        if number < expected:
            raise MessageLost(f"message {number} came after message {expected - 1}")
        self._num_received = number
