"""Waits for a CUDA device, with a deadline."""

import time
from collections.abc import Callable
from typing import Final

import torch

from kv_transfer.errors import TransferError

POLL_S: Final = 50e-6


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Raises TransferError where it is not so within this time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TransferError("a pair of ranks moved nothing for too long")
        time.sleep(POLL_S)


def wait_for_device(device: torch.device, timeout_s: float) -> None:
    """Returns when what was queued on the current stream so far is done. Raises TransferError if that takes longer."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait_until(event.query, timeout_s)
