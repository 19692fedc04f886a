"""How a transfer ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sent:
    """The receiver has committed. `num_bytes` counts every block once, however often it was sent."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Received:
    """Every block is verified and in place. `tail` is what the sender's caller gave to finish."""

    tail: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Nothing may be read from the receiver's blocks. `reason` is one of protos.reasons; `message` says more."""

    reason: str
    message: str
