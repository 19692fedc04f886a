"""Has the kernel read files before they are asked for, so that the disk works while weights are packed."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from serving_core.sharding import Extent

AHEAD_BYTES: Final = 256 * 2**20  # in the page cache, which may count as our memory
PIECE_BYTES: Final = 2**20  # a kernel takes so much of one advice, or less

T = TypeVar("T")


class Span(NamedTuple):
    """Bytes of a file."""

    file: Path
    start: int
    stop: int

    def of_rows(self, rows: Extent) -> "Span":
        """Those of the rows that are held, if these are the bytes of all."""
        row_bytes = (self.stop - self.start) // max(1, rows.total)
        return Span(self.file, self.start + rows.held.start * row_bytes, self.start + rows.held.stop * row_bytes)


def read_ahead(items: Sequence[T], spans_of: Callable[[T], Iterable[Span]]) -> Generator[T]:
    """The items in order, while what the next ones are read from is on its way, of AHEAD_BYTES or one item at least.
    To be closed when it is not gone through to its end."""
    coming, sizes, ahead_bytes = iter(items), deque[int](), 0
    reader = ThreadPoolExecutor(1, "read ahead")
    try:
        for item in items:
            while ahead_bytes < AHEAD_BYTES and (following := next(coming, None)) is not None:
                spans = list(spans_of(following))
                sizes.append(sum(span.stop - span.start for span in spans))
                ahead_bytes += sizes[-1]
                reader.submit(_advise, spans)
            yield item
            ahead_bytes -= sizes.popleft()
    finally:
        reader.shutdown(cancel_futures=True)


def _advise(spans: Sequence[Span]) -> None:
    """What fails here fails again, and is told, where it is read."""
    for file, start, stop in spans:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset in range(start, stop, PIECE_BYTES):
                os.posix_fadvise(descriptor, offset, min(PIECE_BYTES, stop - offset), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
