"""Define `splitserve run-batch`: send a file of requests, in the format of OpenAI's batches and vLLM's run-batch."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import click
import httpx2

from serving_core.errors import SettingsError, SplitServeError
from serving_core.net.backoff import Backoff
from serving_core.net.tls import TlsFiles, client_context
from serving_core.units import MIB, size_of
from splitserve.batches import LATER, MAX_LINE_BYTES, BatchRequest, answered, batch_requests, failed
from splitserve.commands.server_options import SERVER_VARIABLE, api_key_option, tls_options
from splitserve.commands.terminal import report, waiting
from splitserve.signals import run_to_end

CONNECT_S: Final = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a retry, where the server does not say
MAX_ANSWER_BYTES: Final = 256 * MIB
PROGRESS_S: Final = 1.0  # between two lines of progress


class NoAnswerError(SplitServeError):
    """A request that got no complete response."""


@dataclass(slots=True)
class Batch:
    """One run over a file of requests: the server, the limits, and the counts of finished requests."""

    client: httpx2.AsyncClient
    deadline_s: float
    output: IO[str]
    show: Callable[[str], None]
    num_requests: int
    num_answered: int = 0
    num_failed: int = 0
    start_s: float = field(default_factory=time.monotonic)
    shown_s: float = 0.0

    async def run(self, requests: Iterator[BatchRequest], max_concurrency: int) -> None:
        """Send all requests, up to `max_concurrency` at a time, and write a result line for each as it finishes."""

        async def work() -> None:
            for request in requests:
                self._note(*await self._answer(request))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(max_concurrency, self.num_requests)):
                group.create_task(work())

    async def _answer(self, request: BatchRequest) -> tuple[bool, str]:
        """Return whether the request succeeded, and its output line. Retries a request that is refused for the
        moment."""
        if request.problem:
            return False, failed(request, "invalid_request", request.problem)
        pauses = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, calm_s=self.deadline_s)
        last = f"not answered within {self.deadline_s:g} s"
        try:
            async with asyncio.timeout(self.deadline_s):
                while True:
                    pause_s = pauses.next_s(time.monotonic())
                    try:
                        response = await _ask(self.client, "POST", request.path, request.body)
                    except httpx2.HTTPError as error:
                        last = f"the connection failed: {type(error).__name__} {error}"
                    else:
                        if not _is_for_later(response):
                            line = answered(request, response.status_code, _id_of(response), _body(response))
                            return response.is_success, line
                        last = _message(response) or f"status {response.status_code}"
                        pause_s = _retry_after_s(response) or pause_s
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            return False, failed(request, "timeout", last)
        except NoAnswerError as error:
            return False, failed(request, "too_large", str(error))
        except httpx2.InvalidURL as error:
            return False, failed(request, "invalid_request", f"the url is none: {error}")

    def _note(self, is_answered: bool, line: str) -> None:
        self.output.write(line + "\n")
        self.output.flush()
        self.num_answered += is_answered
        self.num_failed += not is_answered
        if (now := time.monotonic()) - self.shown_s >= PROGRESS_S:
            self.shown_s = now
            self.show(self.summary())

    def summary(self) -> str:
        """Return a line that says how many requests were answered and failed, and how long it has taken."""
        failures = f", {self.num_failed} failed" if self.num_failed else ""
        elapsed_s = time.monotonic() - self.start_s
        return f"{self.num_answered} of {self.num_requests} answered{failures}, {elapsed_s:.1f} s"


@click.command(name="run-batch")
@click.option(
    "-i", "--input-file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read requests from this file, one JSON object a line: custom_id, method (POST), url, body.",
)  # fmt: skip
@click.option(
    "-o", "--output-file", required=True, type=click.Path(dir_okay=False, path_type=Path),
    help="Write results to this file, one line for each request as soon as it is finished; it must " "not exist.",
)  # fmt: skip
@click.option(
    "--server", envvar=SERVER_VARIABLE, show_envvar=True, default="http://127.0.0.1:8000", show_default=True,
    help="Ask the server at this HTTP port: http://HOST:PORT, or https.",
)  # fmt: skip
@click.option(
    "--max-concurrency",
    default=64,
    show_default=True,
    type=click.IntRange(1, 4096),
    help="Send at most this many requests at the same time.",
)
@click.option(
    "--deadline", "deadline_s", default=600.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
    help="Give each request this many seconds, retries included.",
)  # fmt: skip
@api_key_option
@tls_options
def run_batch(
    input_file: Path,
    output_file: Path,
    server: str,
    max_concurrency: int,
    deadline_s: float,
    api_key: str | None,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
) -> None:
    """Send all requests of a file to a running server, several at a time, and write their results to a file.

    The files have the format of OpenAI's batches. Requests that the server refuses for the moment are retried. Exit
    code 1 if some failed: their lines say why.
    """
    num_requests = sum(1 for _ in batch_requests(_lines(input_file)))  # the whole file is checked before any request
    client = _client(server, api_key, TlsFiles(tls_cert, tls_key, tls_ca), max_concurrency)

    async def work() -> None:
        async with client:
            await _check(client)
            with waiting("Asking") as show, _created(output_file) as output:
                batch = Batch(client, deadline_s, output, show, num_requests)
                await batch.run(batch_requests(_lines(input_file)), max_concurrency)
        report(batch.summary())
        if batch.num_failed:
            raise SplitServeError(f"{batch.num_failed} of {num_requests} failed: their lines in {output_file} say why")

    run_to_end(work())


async def _check(client: httpx2.AsyncClient) -> None:
    """Raise SplitServeError when no server answers, or the server refuses this client."""
    try:
        async with asyncio.timeout(CONNECT_S):
            response = await _ask(client, "GET", "/v1/models")
    except (TimeoutError, httpx2.HTTPError) as error:
        why = str(error) or f"nothing within {CONNECT_S:g} s"
        raise SplitServeError(
            f"no server answers at {client.base_url}: {why}; start one with: splitserve up"
        ) from error
    if response.status_code != httpx2.codes.OK:
        raise SplitServeError(_message(response) or f"/v1/models is answered with status {response.status_code}")


async def _ask(client: httpx2.AsyncClient, method: str, path: str, body: bytes | None = None) -> httpx2.Response:
    of_body = {"content-type": "application/json"} if body is not None else {}
    async with client.stream(method, path, content=body, headers=of_body) as response:
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise NoAnswerError(f"the answer has more than {size_of(MAX_ANSWER_BYTES)}")
    # httpx2 has decoded the content.
    headers = [(name, value) for name, value in response.headers.items() if name != "content-encoding"]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(content))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            yield line


def _created(path: Path) -> IO[str]:
    try:
        return path.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise SettingsError(f"--output-file {path} is there already: name another one, or take it away") from error
    except OSError as error:
        raise SettingsError(f"--output-file {path} cannot be made: {error.strerror}") from error


def _client(server: str, api_key: str | None, tls: TlsFiles, max_concurrency: int) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    if not server.startswith(("http://", "https://")):
        raise SettingsError(
            f"--server, or {SERVER_VARIABLE}, must be http://HOST:PORT, that of HTTP, or https://, not {server!r}"
        )
    try:
        return httpx2.AsyncClient(
            base_url=server,
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=max_concurrency),
            verify=client_context(tls),
        )
    except httpx2.InvalidURL as error:
        raise SettingsError(f"--server {server!r} is no URL: {error}") from error


def _is_for_later(response: httpx2.Response) -> bool:
    return response.status_code in LATER and response.headers.get("x-should-retry") != "false"


def _retry_after_s(response: httpx2.Response) -> float:
    told = response.headers.get("retry-after", "")
    return float(told) if told.isascii() and told.isdecimal() else 0.0


def _id_of(response: httpx2.Response) -> str:
    return str(response.headers.get("x-request-id", ""))


def _body(response: httpx2.Response) -> Any:
    """Return the body as JSON, or as text when it is not valid JSON."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return response.text


def _message(response: httpx2.Response) -> str:
    match _body(response):
        case {"error": {"message": str(message)}}:
            return message
    return ""
