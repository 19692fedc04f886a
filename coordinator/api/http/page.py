"""Serve the web page at /ui: three static files, and the JSON overview that the page polls."""

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from google.protobuf.json_format import MessageToJson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from coordinator.api.validation import bad
from protos import inference_pb2

ROOT_PATH: Final = "/"
OVERVIEW_PATH: Final = "/ui/overview"
_FILES: Final = {
    "/ui": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
PAGE_PATHS: Final = tuple(_FILES)
_FOLDER: Final = Path(__file__).parent / "ui"
MOST_AFTER: Final = 2**64 - 1

AskOverview = Callable[[int | None], Awaitable[inference_pb2.Overview]]
"""Return the current overview; the argument is `after` of GetOverviewRequest."""

# Only own files and calls to the own server: no other page may frame this page, and no text in it can become code.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class Page:
    """Serve the page. Its files are read once.

    PAGE_PATHS are the static files, ROOT_PATH redirects browsers to them, and OVERVIEW_PATH needs the API key if there
    is one.
    """

    def __init__(self, overview: AskOverview) -> None:
        self._overview = overview
        self._files = {path: (_FOLDER / name).read_bytes() for path, (name, _) in _FILES.items()}

    def routes(self) -> list[Route]:
        files = [Route(path, self._file(path)) for path in PAGE_PATHS]
        return [Route(ROOT_PATH, _lead), *files, Route(OVERVIEW_PATH, self.overview)]

    async def overview(self, request: Request) -> Response:
        """Return the Overview message as JSON; ?after=N is as in GetOverviewRequest."""
        overview = await self._overview(_after(request.query_params.get("after")))
        told = MessageToJson(
            overview, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
        )
        return Response(told, media_type="application/json", headers={"cache-control": "no-store"})

    def _file(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        return partial(_respond, self._files[path], _FILES[path][1])


def _after(given: str | None) -> int | None:
    if given is None:
        return None
    is_number = given.isascii() and given.isdecimal() and len(given) <= len(str(MOST_AFTER))
    if not is_number or int(given) > MOST_AFTER:
        raise bad("after", f"must be a whole number of at most {MOST_AFTER}, not {given[:30]!r}")
    return int(given)


async def _lead(request: Request) -> Response:
    """Redirect browsers, which ask for HTML, to the page. Other clients, which may look for an API here, get 404."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return RedirectResponse("ui")  # relative, since a proxy may serve all of this under a path prefix


async def _respond(body: bytes, media_type: str, _: Request) -> Response:
    return Response(body, headers={**_HEADERS, "content-type": media_type})
