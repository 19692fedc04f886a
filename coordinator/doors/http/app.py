"""The OpenAI-compatible door: its endpoints, as an ASGI application."""

import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.doors.exposition import CONTENT_TYPE, Exposition
from coordinator.doors.front import Front, within
from coordinator.doors.http.answering import Answering, unless_gone
from coordinator.doors.http.bodies import read_json
from coordinator.doors.http.door import REQUEST_ID_HEADER, Door, request_id_for
from coordinator.doors.http.errors import on_http_exception, on_request_error, renamed
from coordinator.doors.http.fields import Fields
from coordinator.doors.http.requests import (
    CHAT_NAMES,
    COMPLETION_NAMES,
    Asked,
    parse_chat,
    parse_completion,
    parse_messages,
)
from coordinator.doors.http.responses import ChatForm, CompletionForm, Form
from coordinator.doors.http.slo import set_limits
from coordinator.text.tokenizer import TokenLimit
from protos.inference_pb2 import ChatInput, GenerateRequest
from serving_core.errors import RequestError
from serving_core.reasons import MODEL_NOT_FOUND

R = TypeVar("R")

MAX_LISTED_TOKENS: Final = 2**17  # at /tokenize and /detokenize, or what the context holds if that is more

IsServing = Callable[[], Awaitable[bool]]
"""Whether requests can be answered now."""


class Endpoints:
    """What is answered at each path."""

    def __init__(self, front: Front, is_serving: IsServing, exposition: Exposition) -> None:
        self._front = front
        self._is_serving = is_serving
        self._exposition = exposition
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/ping", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
        ]

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["model"]) != self._front.model.name:
            raise self._not_served(name)
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> ASGIApp:
        return await self._begin(request, parse_completion, CompletionForm, COMPLETION_NAMES)

    async def chat_completions(self, request: Request) -> ASGIApp:
        return await self._begin(request, parse_chat, ChatForm, CHAT_NAMES)

    async def tokenize(self, request: Request) -> Response:
        fields = await read_json(request, _as_it_is)
        self._check_model(fields.text("model"))
        response = await self._while_there(request, self._tokenized(fields))
        self._check_unread(request, fields.unread())
        return JSONResponse(response)

    async def detokenize(self, request: Request) -> Response:
        fields = await read_json(request, _as_it_is)
        self._check_model(fields.text("model"))
        if "tokens" not in fields:
            raise fields.problem("tokens", "is missing")
        token_ids = fields.integers("tokens", self._most_listed())
        self._check_unread(request, fields.unread())
        text = await self._while_there(request, self._front.model.tokenizer.decode(token_ids))
        return JSONResponse({"prompt": text})

    async def health(self, request: Request) -> Response:
        """Whether requests can be answered; with ?node=NAME, whether that node takes them."""
        node = request.query_params.get("node")
        is_well = await self._is_serving() if node is None else self._front.is_ready(node)
        return Response(status_code=200 if is_well else 503)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": importlib.metadata.version("splitserve")})

    async def metrics(self, _: Request) -> Response:
        return Response(self._exposition.render(), headers={"content-type": CONTENT_TYPE})

    async def _begin(
        self,
        request: Request,
        parse: Callable[[Fields, str], Asked],
        form_class: type[Form],
        names: Mapping[str, str],
    ) -> ASGIApp:
        request_id = request.headers.get(REQUEST_ID_HEADER) or request_id_for(request.scope)

        def parsed(fields: Fields) -> tuple[Asked, list[str]]:
            asked = parse(fields, request_id)
            set_limits(asked.requests, fields, request.headers)
            return asked, fields.unread()

        with self._front.noting_refusal(request_id):
            asked, unread = await read_json(request, parsed)
            self._check_unread(request, unread)
        form = form_class(asked, self._front.model.tokenizer)
        return Answering(self._front, form, request_id, names)

    async def _while_there(self, request: Request, work: Coroutine[Any, Any, R]) -> R:
        """What the work on a text gives, in time and while its client waits for it."""
        async with within(self._front.request_timeout_s):
            return await unless_gone(request.receive, work)

    async def _tokenized(self, fields: Fields) -> dict[str, Any]:
        token_ids = await self._token_ids(fields)
        max_model_len = self._front.limits().max_model_len
        response: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}
        if fields.boolean("return_token_strs"):
            response["token_strs"] = await self._front.model.tokenizer.token_texts(token_ids)
        return response

    async def _token_ids(self, fields: Fields) -> list[int]:
        field = "messages" if "messages" in fields else "prompt"
        most = self._most_listed()
        limit = TokenLimit(
            most, lambda fewest: fields.problem(field, f"has at least {fewest} tokens, the limit is {most}")
        )
        if field == "messages":
            asked = GenerateRequest(chat=ChatInput(messages=parse_messages(fields)))
            try:
                token_ids = await self._front.tokenize(asked, limit)
            except RequestError as error:
                raise renamed(error, CHAT_NAMES) from error
        else:
            prompt = fields.text("prompt")
            if prompt is None:
                raise fields.problem("prompt", "is missing: send it, or messages")
            with_special = fields.boolean("add_special_tokens") is not False
            token_ids = await self._front.model.tokenizer.encode(prompt, limit, add_special_tokens=with_special)
        if len(token_ids) > most:
            raise limit.refusal(len(token_ids))
        return token_ids

    def _most_listed(self) -> int:
        return max(MAX_LISTED_TOKENS, self._front.limits().max_model_len)

    def _check_unread(self, request: Request, unread: list[str]) -> None:
        """Warns of fields that nobody has read, or refuses them."""
        request.scope["state"]["warning"] = self._front.unknown_fields.check(unread)

    def _check_model(self, name: str | None) -> None:
        if name and name != self._front.model.name:
            raise self._not_served(name)

    def _not_served(self, name: str) -> RequestError:
        message = f"there is no model {name[:80]!r}; {self._front.model.name!r} is served"
        return RequestError(MODEL_NOT_FOUND, message, field="model")

    def _model(self) -> dict[str, Any]:
        name = self._front.model.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "splitserve",
            "root": name,
            "parent": None,
            "max_model_len": self._front.limits().max_model_len,
            "vocab_size": self._front.model.config.vocab_size,
        }


def _as_it_is(fields: Fields) -> Fields:
    return fields


def make_app(
    front: Front,
    is_serving: IsServing,
    exposition: Exposition,
    *,
    secret: str,
    allowed_origins: Collection[str],
    max_calls: int,
) -> Starlette:
    """The application. With a secret, every call but health checks must bring it. Web pages of the allowed origins
    may call it, and read its answers."""
    door = Middleware(Door, secret=secret, allowed_origins=allowed_origins, max_calls=max_calls)
    app = Starlette(
        routes=Endpoints(front, is_serving, exposition).routes(),
        middleware=[_cors(allowed_origins), door] if allowed_origins else [door],
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False
    return app


def _cors(allowed_origins: Collection[str]) -> Middleware:
    """Stands before the door: what browsers ask ahead of a call brings no secret."""
    return Middleware(
        CORSMiddleware,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("*",),
    )
