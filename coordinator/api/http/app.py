"""Define the endpoints of the OpenAI-compatible API as an ASGI application."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.api.authentication import ASKER, BearerSecrets
from coordinator.api.exposition import CONTENT_TYPE
from coordinator.api.http import openapi
from coordinator.api.http.anthropic_messages import MessagesCall
from coordinator.api.http.anthropic_messages_models import MessagesRequest
from coordinator.api.http.api_adapters import ApiAdapter, Translation
from coordinator.api.http.body import read_json
from coordinator.api.http.decisions import (
    DECISION_NAMES,
    SYSTEMONE_NAMES,
    decisions_body,
    parse_decisions,
    parse_systemone,
    systemone_body,
)
from coordinator.api.http.decisions_models import (
    DecisionsRequest,
    RerankRequest,
    ScorePairsRequest,
    Scoring,
    SystemOneRequest,
)
from coordinator.api.http.embeddings import FLOAT, check_size, embed_all, response_body
from coordinator.api.http.errors import ANTHROPIC_PATH, on_http_exception, on_request_error, renamed
from coordinator.api.http.field_types import RequestModel
from coordinator.api.http.generating import GenerationApp, unless_gone
from coordinator.api.http.middleware import (
    DOCS_PATH,
    LOAD_ADAPTER_PATH,
    OPENAPI_PATH,
    REQUEST_ID_HEADER,
    UNLOAD_ADAPTER_PATH,
    Access,
    CountCall,
    Counting,
    request_id_for,
)
from coordinator.api.http.openai_responses import ResponsesCall
from coordinator.api.http.openai_responses_models import ResponsesRequest
from coordinator.api.http.openapi import ENDPOINTS
from coordinator.api.http.page import Page
from coordinator.api.http.rankings import RANKING_NAMES, parse_pairs, parse_rerank, rerank_body, score_body
from coordinator.api.http.request_models import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    Generating,
    LoadAdapterRequest,
    Scheduled,
    TokenizeRequest,
    TokensRequest,
    UnloadAdapterRequest,
)
from coordinator.api.http.requests import (
    CHAT_NAMES,
    ParsedRequest,
    embed_requests,
    parse_batch,
    parse_chat,
    parse_completion,
    parse_tokenize,
    service_tier,
    set_limits,
)
from coordinator.api.http.responses import ChatFormatter, ChoiceFormatter, CompletionFormatter
from coordinator.api.http.several import each_of
from coordinator.api.http.tokens import TOKENS_PATH, TokensFormatter, check_renders, parse_tokens, tokens_call
from coordinator.api.preprocess import Preprocessor
from coordinator.api.prompts import tokenize, within
from coordinator.api.validation import bad, check_chat, check_count, check_token_ids
from coordinator.control.request_log import CallRecord
from coordinator.text.answer_format import AnswerFormat
from coordinator.text.tokenizer import TokenLimit
from protos import inference_pb2
from protos.inference_pb2 import ChatInput, EmbedRequest, GenerateRequest, ScoreRequest, ScoreResponse
from serving_core.errors import RequestError
from serving_core.json_fields import json_line
from serving_core.process.telemetry import CURRENT_REQUEST
from serving_core.reasons import MODEL_NOT_FOUND
from serving_core.version import VERSION

B = TypeVar("B", bound=RequestModel)
G = TypeVar("G", bound=Generating)
Q = TypeVar("Q", bound=Scheduled)
R = TypeVar("R")
S = TypeVar("S", bound=Scoring)

OPENAI: Final = ApiAdapter()
MAX_LISTED_TOKENS: Final = 2**17  # of /tokenize and /detokenize, or max_model_len, if larger

IsServing = Callable[[], Awaitable[bool]]
"""Return whether requests can be served."""
Metrics = Callable[[], Awaitable[bytes]]
"""Return the text of all metrics, of type CONTENT_TYPE."""
ChangeAdapters = Callable[[str, Message], Awaitable[None]]
"""Call a method of Admin, LoadAdapter or UnloadAdapter, with its request. Raises RequestError."""


class Endpoints:
    """Implement the endpoints."""

    def __init__(
        self, preprocessor: Preprocessor, is_serving: IsServing, metrics: Metrics, change_adapters: ChangeAdapters
    ) -> None:
        self._preprocessor = preprocessor
        self._change_adapters = change_adapters
        self._is_serving = is_serving
        self._metrics = metrics
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route(ANTHROPIC_PATH, self.messages, methods=["POST"]),
            Route(f"{ANTHROPIC_PATH}/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/decisions", self.decisions, methods=["POST"]),
            Route("/v1/systemone", self.systemone, methods=["POST"]),
            Route("/v1/score", self.score, methods=["POST"]),
            Route("/v1/rerank", self.rerank, methods=["POST"]),
            Route("/v1/chat/completions/batch", self.chat_batch, methods=["POST"]),
            Route(TOKENS_PATH, self.generate_tokens, methods=["POST"]),
            Route("/v1/completions/render", self.render_completions, methods=["POST"]),
            Route("/v1/chat/completions/render", self.render_chat, methods=["POST"]),
            Route("/v1/responses/render", self.render_response, methods=["POST"]),
            Route(f"{ANTHROPIC_PATH}/render", self.render_message, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route(LOAD_ADAPTER_PATH, self.load_adapter, methods=["POST"]),
            Route(UNLOAD_ADAPTER_PATH, self.unload_adapter, methods=["POST"]),
            Route("/load", self.load),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/invocations", self.invocations, methods=["POST"]),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
        ]

    def described(self) -> list[Route]:
        """Return all routes, and those of their description."""
        routes = self.routes()
        told = openapi.document(routes)
        document, page = json.dumps(told), openapi.page(told)

        async def openapi_json(_: Request) -> Response:
            return Response(document, media_type="application/json")

        async def docs(_: Request) -> Response:
            return Response(page, media_type="text/html", headers={"content-security-policy": "default-src 'none'"})

        return [*routes, Route(OPENAPI_PATH, openapi_json), Route(DOCS_PATH, docs)]

    async def models(self, _: Request) -> Response:
        """List the served names and the LoRA adapters."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """Return one of the served names or LoRA adapters."""
        if (name := request.path_params["model"]) not in self._names:
            raise self._not_served(name)
        return JSONResponse(self._model(name))

    async def completions(self, request: Request) -> ASGIApp:
        """Generate completions, streamed or whole."""
        return await self._begin(request, CompletionRequest.read, parse_completion)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Generate chat completions, streamed or whole."""
        return await self._begin(request, ChatRequest.read, partial(parse_chat, answer_format=self._answer_format))

    async def chat_batch(self, request: Request) -> ASGIApp:
        """Generate one chat completion for each of several conversations."""
        return await self._begin(request, BatchRequest.read, partial(parse_batch, answer_format=self._answer_format))

    async def generate_tokens(self, request: Request) -> ASGIApp:
        """Generate from token ids, streamed or whole, as vLLM does: the output is token ids, and text if asked for."""
        return await self._begin(request, TokensRequest.read, partial(parse_tokens, answer_format=self._answer_format))

    async def render_completions(self, request: Request) -> Response:
        """Return the calls of /inference/v1/generate that generate what a completion does, one for each prompt."""
        rendered = await self._rendered(request, CompletionRequest.read, parse_completion)
        return Response(f"[{','.join(rendered)}]", media_type="application/json")

    async def render_chat(self, request: Request) -> Response:
        """Return the call of /inference/v1/generate that generates what a chat completion does."""
        parse = partial(parse_chat, answer_format=self._answer_format)
        [rendered] = await self._rendered(request, ChatRequest.read, parse)
        return Response(rendered, media_type="application/json")

    async def render_response(self, request: Request) -> Response:
        """Return the call of /inference/v1/generate that generates what a call of /v1/responses does."""
        return await self._rendered_translation(request, ResponsesRequest.read, ResponsesCall())

    async def render_message(self, request: Request) -> Response:
        """Return the call of /inference/v1/generate that generates what a call of /v1/messages does."""
        return await self._rendered_translation(request, MessagesRequest.read, MessagesCall())

    async def invocations(self, request: Request) -> ASGIApp:
        """Serve Amazon SageMaker's single path by the endpoint that the body's fields belong to."""
        if self._preprocessor.model.config.embedder is not None:
            return await self.embeddings(request)

        def read(values: dict[str, Any]) -> ChatRequest | CompletionRequest:
            is_chat = values.get("messages") is not None
            return ChatRequest.read(values) if is_chat else CompletionRequest.read(values)

        def parse(body: ChatRequest | CompletionRequest, request_id: str) -> ParsedRequest:
            if isinstance(body, ChatRequest):
                return parse_chat(body, request_id, self._answer_format)
            return parse_completion(body, request_id)

        return await self._begin(request, read, parse)

    async def responses(self, request: Request) -> ASGIApp:
        """Generate a response of OpenAI's API of responses, streamed or whole."""
        return await self._translated(request, ResponsesRequest.read, ResponsesCall())

    async def messages(self, request: Request) -> ASGIApp:
        """Generate a message of Anthropic's API, streamed or whole."""
        return await self._translated(request, MessagesRequest.read, MessagesCall())

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens that a call of /v1/messages would have."""
        call, request_id = MessagesCall(), request_id_for(request.scope)

        def parse(body: MessagesRequest) -> GenerateRequest:
            [counted] = call.parse(body, request_id, self._answer_format).requests
            return counted

        counted = await self._read(request, MessagesRequest.read, parse)
        self._check_model(counted.model)
        try:
            token_ids = await self._while_there(request, self._chat_token_ids(counted.chat))
        except RequestError as error:
            raise call.named(error) from error
        return JSONResponse({"input_tokens": len(token_ids)})

    async def embeddings(self, request: Request) -> Response:
        """Return an embedding of each input."""
        given, drawn = request.headers.get(REQUEST_ID_HEADER), request_id_for(request.scope)

        def parse(body: EmbeddingsRequest) -> tuple[Sequence[EmbedRequest], str]:
            requests, encoding = embed_requests(body, given or body.request_id or drawn), body.encoding_format or FLOAT
            size = body.dimensions or self._preprocessor.model.config.hidden_size
            check_size(len(requests), size, encoding)
            return requests, encoding

        with self._preprocessor.noting_refusal(CallRecord(given or drawn, ASKER.get())):
            requests, encoding = await self._read(request, EmbeddingsRequest.read, parse)
        embeddings = await unless_gone(request.receive, embed_all(self._preprocessor, requests))
        name = self._preprocessor.model.name_in_responses(requests[0].model)
        body = await asyncio.to_thread(response_body, embeddings, encoding, name)
        return Response(body, media_type="application/json")

    async def decisions(self, request: Request) -> Response:
        """Answer questions about one input with probabilities."""
        return await self._score(request, DecisionsRequest.read, parse_decisions, decisions_body, DECISION_NAMES)

    async def systemone(self, request: Request) -> Response:
        """Answer questions about one state with probabilities, in the format of TypeSafe's System One."""
        return await self._score(request, SystemOneRequest.read, parse_systemone, systemone_body, SYSTEMONE_NAMES)

    async def score(self, request: Request) -> Response:
        """Score how relevant documents are for queries."""
        parse = partial(parse_pairs, template=self._preprocessor.model.tokenizer.template_words)
        return await self._score(request, ScorePairsRequest.read, parse, score_body, RANKING_NAMES)

    async def rerank(self, request: Request) -> Response:
        """Rank documents by how relevant they are for a query."""
        parse = partial(parse_rerank, template=self._preprocessor.model.tokenizer.template_words)
        return await self._score(request, RerankRequest.read, parse, rerank_body, RANKING_NAMES)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt or a conversation."""
        body, text = await self._read(request, TokenizeRequest.read, lambda body: (body, parse_tokenize(body)))
        self._check_model(body.model)
        return JSONResponse(await self._while_there(request, self._tokenized(body, text)))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        body = await self._read(request, DetokenizeRequest.read, lambda body: body)
        check_count("tokens", len(body.tokens), self._most_listed())
        self._check_model(body.model)
        check_token_ids("tokens", body.tokens, self._preprocessor.limits())
        text = await self._while_there(request, self._preprocessor.model.tokenizer.decode(body.tokens))
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, _: Request) -> Response:
        """Return the tokenizer's configuration."""
        return Response(self._preprocessor.model.tokenizer.info_json, media_type="application/json")

    async def load_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter on every node, and respond when requests may name it."""
        body = await self._read(request, LoadAdapterRequest.read, lambda body: body)
        await self._change("LoadAdapter", inference_pb2.LoadAdapterRequest(name=body.lora_name, folder=body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name} is loaded.")

    async def unload_adapter(self, request: Request) -> Response:
        """Unload a LoRA adapter: no more requests may name it, and those that run with it finish."""
        body = await self._read(request, UnloadAdapterRequest.read, lambda body: body)
        await self._change("UnloadAdapter", inference_pb2.UnloadAdapterRequest(name=body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name} is unloaded.")

    async def _change(self, method: str, request: Message) -> None:
        try:
            await self._change_adapters(method, request)
        except RequestError as error:
            raise renamed(error, {"name": "lora_name", "folder": "lora_path"}) from error

    async def load(self, _: Request) -> Response:
        """Return the number of requests in flight or queued, under vLLM's name."""
        return JSONResponse({"server_load": self._preprocessor.num_live})

    async def health(self, request: Request) -> Response:
        """Respond 200 when requests can be served, else 503; with ?node=NAME, when that node accepts requests."""
        node = request.query_params.get("node")
        is_well = await self._is_serving() if node is None else self._preprocessor.is_ready(node)
        return Response(status_code=200 if is_well else 503)

    async def ready(self, _: Request) -> Response:
        """Respond whether prefill and decode nodes are ready and the API server is open, with the reason if not."""
        why = self._preprocessor.why_not_ready()
        return JSONResponse({"ready": not why, **({"reason": why} if why else {})}, status_code=503 if why else 200)

    async def version(self, _: Request) -> Response:
        """Return the server's version."""
        return JSONResponse({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        """Return the metrics for Prometheus."""
        return Response(await self._metrics(), headers={"content-type": CONTENT_TYPE})

    async def _translated(self, request: Request, read: Callable[[dict[str, Any]], G], call: Translation[G]) -> ASGIApp:
        return await self._begin(request, read, partial(call.parse, answer_format=self._answer_format), call)

    async def _rendered_translation(
        self, request: Request, read: Callable[[dict[str, Any]], G], call: Translation[G]
    ) -> Response:
        [rendered] = await self._rendered(request, read, partial(call.parse, answer_format=self._answer_format), call)
        return Response(rendered, media_type="application/json")

    async def _rendered(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], Q],
        parse: Callable[[Q, str], ParsedRequest],
        api_adapter: ApiAdapter = OPENAI,
    ) -> list[str]:
        """Return the calls of TOKENS_PATH as JSON, one for each prompt. Raises RequestError."""
        _, parsed = await self._parsed(request, read, parse)

        async def render(each: GenerateRequest) -> str:
            plan = await self._preprocessor.planned(each, parsed.terms)
            text = await self._preprocessor.model.tokenizer.decode(plan.prompt)
            return await asyncio.to_thread(json_line, tokens_call(each, plan, parsed, text))

        async def render_all() -> list[str]:
            return [await render(each) for each in parsed.requests]

        try:
            check_renders(parsed)
            return await self._while_there(request, render_all())
        except RequestError as error:
            raise api_adapter.named(renamed(error, parsed.names)) from error

    async def _begin(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], Q],
        parse: Callable[[Q, str], ParsedRequest],
        api_adapter: ApiAdapter = OPENAI,
    ) -> ASGIApp:
        request_id, parsed = await self._parsed(request, read, parse)
        return GenerationApp(self._preprocessor, self._formatter(parsed), request_id, api_adapter)

    async def _parsed(
        self, request: Request, read: Callable[[dict[str, Any]], Q], parse: Callable[[Q, str], ParsedRequest]
    ) -> tuple[str, ParsedRequest]:
        """Return the id and the requests of a call. Raises RequestError."""
        given, drawn = request.headers.get(REQUEST_ID_HEADER), request_id_for(request.scope)

        def convert(body: Q) -> tuple[str, ParsedRequest]:
            request_id = given or body.request_id or drawn
            parsed = parse(body, request_id)
            limits = set_limits(parsed.requests, body, request.headers, self._preprocessor.slo_classes)
            names = {**parsed.names, **limits}
            if given:
                names["request_id"] = REQUEST_ID_HEADER
            if parsed.offer is not None and parsed.offer.schema:
                names["json_schema"] = "tools"
            return request_id, replace(parsed, names=names, service_tier=service_tier(parsed.requests, body))

        with self._preprocessor.noting_refusal(CallRecord(given or drawn, ASKER.get())):
            request_id, parsed = await self._read(request, read, convert)
            CURRENT_REQUEST.set(request_id)
        return request_id, parsed

    async def _score(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], S],
        parse: Callable[[S, str], Sequence[ScoreRequest]],
        body_of: Callable[[S, Sequence[ScoreResponse], str], dict[str, Any]],
        names: Mapping[str, str],
    ) -> Response:
        """Return the response that `body_of` makes of the Score requests of a call; `names` are for errors."""
        given, drawn = request.headers.get(REQUEST_ID_HEADER), request_id_for(request.scope)

        def convert(body: S) -> tuple[S, Sequence[ScoreRequest]]:
            requests = parse(body, given or body.request_id or drawn)
            set_limits(requests, body, request.headers)
            return body, requests

        def named(error: RequestError, _index: int) -> RequestError:
            return renamed(error, names)

        with self._preprocessor.noting_refusal(CallRecord(given or drawn, ASKER.get())):
            body, requests = await self._read(request, read, convert)
        work = each_of(self._preprocessor, requests, self._preprocessor.score, named)
        responses = await unless_gone(request.receive, work)
        name = self._preprocessor.model.name_in_responses(body.model or "")
        return JSONResponse(await asyncio.to_thread(body_of, body, responses, name))

    async def _read(self, request: Request, read: Callable[[dict[str, Any]], B], parse: Callable[[B], R]) -> R:
        """Return `parse` of the body, and set the warning for its unknown fields. Raises RequestError for an invalid
        body, and for unknown fields when strict."""

        def convert(values: dict[str, Any]) -> tuple[R, list[str]]:
            body = read(values)
            return parse(body), body.unknown_fields()

        result, unknown = await read_json(request, convert)
        request.scope["state"]["warning"] = self._preprocessor.unknown_fields.check(unknown)
        return result

    @property
    def _answer_format(self) -> AnswerFormat:
        return self._preprocessor.model.answer_format

    def _formatter(self, parsed: ParsedRequest) -> ChoiceFormatter:
        model = self._preprocessor.model
        if parsed.output_mode:
            return TokensFormatter(parsed, model.tokenizer)
        if parsed.requests[0].HasField("chat"):
            return ChatFormatter(parsed, model.tokenizer, model.answer_format)
        return CompletionFormatter(parsed, model.tokenizer)

    async def _while_there(self, request: Request, work: Coroutine[Any, Any, R]) -> R:
        """Return the result of `work` within the request timeout, unless the client disconnects first."""
        async with within(self._preprocessor.request_timeout_s, "the result was"):
            return await unless_gone(request.receive, work)

    async def _tokenized(self, body: TokenizeRequest, text: ChatInput | str) -> dict[str, Any]:
        adds_special_tokens = body.add_special_tokens is not False
        token_ids = await self._token_ids(text, adds_special_tokens=adds_special_tokens)
        max_model_len = self._preprocessor.limits().max_model_len
        texts = await self._preprocessor.model.tokenizer.tokens(token_ids) if body.return_token_strs else None
        return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": texts}

    async def _token_ids(self, text: ChatInput | str, *, adds_special_tokens: bool) -> list[int]:
        if isinstance(text, ChatInput):
            return await self._chat_token_ids(text)
        tokenizer, limit = self._preprocessor.model.tokenizer, self._listed_limit("prompt")
        return _listed(await tokenizer.encode(text, limit, add_special_tokens=adds_special_tokens), limit)

    async def _chat_token_ids(self, chat: ChatInput) -> list[int]:
        limit = self._listed_limit("messages")
        try:
            check_chat(chat)
            token_ids = await tokenize(self._preprocessor.model.tokenizer, GenerateRequest(chat=chat), limit)
            return _listed(token_ids, limit)
        except RequestError as error:
            raise renamed(error, CHAT_NAMES) from error

    def _listed_limit(self, field: str) -> TokenLimit:
        most = self._most_listed()
        return TokenLimit(most, lambda fewest: bad(field, f"has at least {fewest} tokens, the limit is {most}"))

    def _most_listed(self) -> int:
        return max(MAX_LISTED_TOKENS, self._preprocessor.limits().max_model_len)

    def _check_model(self, name: str | None) -> None:
        if name and name not in self._names:
            raise self._not_served(name)

    def _not_served(self, name: str) -> RequestError:
        message = f"there is no model {name[:80]!r}; {self._preprocessor.model.name!r} is served"
        return RequestError(MODEL_NOT_FOUND, message, field="model")

    @property
    def _names(self) -> list[str]:
        """All names that a request may give as its model: the served names and the LoRA adapters."""
        return [*self._preprocessor.model.names, *self._preprocessor.adapters]

    def _model(self, name: str) -> dict[str, Any]:
        base = self._preprocessor.model.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "splitserve",
            "root": base,
            "parent": None if name in self._preprocessor.model.names else base,
            "max_model_len": self._preprocessor.limits().max_model_len,
            "vocab_size": self._preprocessor.model.config.vocab_size,
        }


def _listed(token_ids: list[int], limit: TokenLimit) -> list[int]:
    if len(token_ids) > limit.most:
        raise limit.refusal(len(token_ids))
    return token_ids


def make_app(
    preprocessor: Preprocessor,
    is_serving: IsServing,
    metrics: Metrics,
    page: Page | None,
    *,
    change_adapters: ChangeAdapters,
    count_call: CountCall,
    secrets: BearerSecrets | None,
    admin_key: BearerSecrets | None,
    allowed_origins: Collection[str],
    max_calls: int,
) -> Starlette:
    """Return the ASGI application.

    With `secrets`, every call except health checks must bring one; the data of the page need `admin_key` if given. Web
    pages of `allowed_origins` may call the API and read its responses. With `page`, the application serves the page
    too.
    """
    for model in ENDPOINTS.values():
        model.model_rebuild()  # not in the first call
    routes = Endpoints(preprocessor, is_serving, metrics, change_adapters).described() + (page.routes() if page else [])
    counting = Middleware(Counting, count_call=count_call, routes=routes)
    api_server = Middleware(
        Access,
        secrets=secrets,
        admin_key=admin_key,
        allowed_origins=allowed_origins,
        max_calls=max_calls,
        noting_refusal=preprocessor.noting_refusal,
    )
    app = Starlette(
        routes=routes,
        middleware=[counting, _cors(allowed_origins), api_server] if allowed_origins else [counting, api_server],
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False
    return app


def _cors(allowed_origins: Collection[str]) -> Middleware:
    """Return the CORS middleware, which runs before authentication: preflight requests bring no secret."""
    return Middleware(
        CORSMiddleware,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("*",),
    )
