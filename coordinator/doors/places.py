"""How many gRPC calls a door answers at a time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from coordinator.control.request_log import CallRecord
from coordinator.doors.authentication import ASKER
from serving_core.errors import RequestError
from serving_core.reasons import QUEUE_FULL


class Places:
    """Taken by calls that may be made, one each."""

    def __init__(self, most: int, noting_refusal: Callable[[CallRecord], AbstractContextManager[None]]) -> None:
        self._most = most
        self._noting_refusal = noting_refusal
        self._num_taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold a place. Raises RequestError where there is none."""
        if self._num_taken >= self._most:
            with self._noting_refusal(CallRecord("", ASKER.get())):
                raise RequestError(QUEUE_FULL, f"{self._num_taken} calls at once, the limit is {self._most}")
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1
