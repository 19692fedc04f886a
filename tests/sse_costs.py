"""What a token streamed as server-sent events costs the API process of running servers, ours and others' in turn:
`python -m tests.sse_costs NAME:PORT:PID ... [--streams N ...] [--repeats N]`.

Each server has the model `m`. Told is the CPU time of process PID, divided by the events, from when every stream has
begun until the first one ends.
"""

import argparse
import asyncio
import json
from dataclasses import dataclass, field

import click
import psutil

NUM_TOKENS = 256
BODY = {"model": "m", "prompt": [97, 98, 99], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
DEADLINE_S = 300.0
EACH_EVENT = b'"finish_reason"'


@dataclass
class Reading:
    """What has been read of one server while all streams were under way."""

    process: psutil.Process
    number: int
    num_begun: int = 0
    num_events: int = 0
    cpu_s: list[float] = field(default_factory=list)  # at the two ends

    async def all(self, port: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(self._one(port) for _ in range(self.number)))

    async def _one(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({**BODY, "stream": True})
        writer.write((HEAD.format(len(body)) + body).encode())
        has_begun = False
        while data := await reader.read(2**16):
            num_events = data.count(EACH_EVENT)
            if num_events and not has_begun:
                has_begun = True
                self.num_begun += 1
                if self.num_begun == self.number:
                    self._note()
            elif len(self.cpu_s) == 1:
                self.num_events += num_events
            if b"[DONE]" in data:
                break
        if len(self.cpu_s) == 1:
            self._note()
        writer.close()

    def _note(self) -> None:
        times = self.process.cpu_times()
        self.cpu_s.append(times.user + times.system)

    def __str__(self) -> str:
        begin_s, end_s = self.cpu_s
        return f"{1e6 * (end_s - begin_s) / max(1, self.num_events):.0f} us of CPU time an event ({self.num_events})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("servers", nargs="+", metavar="NAME:PORT:PID")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    for number in given.streams:
        for _ in range(given.repeats):
            for server in given.servers:
                name, port, pid = server.split(":")
                reading = Reading(psutil.Process(int(pid)), number)
                asyncio.run(reading.all(int(port)))
                click.echo(f"{name}, {number} streams: {reading}")


if __name__ == "__main__":
    main()
