"""Server-sent events as completions use them: one `data:` line each. Pure: bytes in, the data of events out."""

from typing import Final

from splitserve_bench.serve.reply import RequestFailed

DONE: Final = b"[DONE]"
MOST_LINE_BYTES: Final = 2**22
DATA: Final = b"data:"


class EventStream:
    """Lines may come in any pieces, and end as the standard allows but for a lone CR."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events whose lines are whole now; comments and other fields are left out.

        Raises RequestFailed for a line that does not end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            raise RequestFailed(f"a line of the answer has more than {MOST_LINE_BYTES} bytes")
        return [line[len(DATA) :].strip() for line in lines if line.startswith(DATA)]
