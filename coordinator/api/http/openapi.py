"""Describe the HTTP API by its routes and request models: an OpenAPI document, and a page for people."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from coordinator.api.http.anthropic_messages_models import MessagesRequest
from coordinator.api.http.decisions_models import DecisionsRequest, RerankRequest, ScorePairsRequest, SystemOneRequest
from coordinator.api.http.field_types import RequestModel
from coordinator.api.http.openai_responses_models import ResponsesRequest
from coordinator.api.http.request_models import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    TokensRequest,
    UnloadAdapterRequest,
)
from serving_core.version import VERSION

ENDPOINTS: Final[dict[str, type[RequestModel]]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/batch": BatchRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/decisions": DecisionsRequest,
    "/v1/systemone": SystemOneRequest,
    "/v1/score": ScorePairsRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/inference/v1/generate": TokensRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
_RENDERED: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_BODIES: Final[dict[str, type[RequestModel]]] = {
    **ENDPOINTS,
    **{f"{path}/render": ENDPOINTS[path] for path in _RENDERED},
    "/v1/messages/count_tokens": MessagesRequest,
}
_PLACE: Final = "#/components/schemas/"
LARGEST: Final = 2**31 - 1
_RESPONSES: Final = {
    "200": {"description": "The result; events where the body has stream: true."},
    "default": {"description": "An error object, as the API of the path has it. It names every invalid field."},
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in ENDPOINTS.values()], ref_template=f"{_PLACE}{{model}}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "SplitServe", "version": VERSION},
        "paths": {route.path_format: dict(_operations(route)) for route in routes},
        "components": {"schemas": schemas["$defs"]},
    }


def _operations(route: Route) -> Iterator[tuple[str, Any]]:
    about = (route.endpoint.__doc__ or "").partition("\n")[0]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    for method in sorted((route.methods or set()) - {"HEAD"}):
        operation: dict[str, Any] = {"summary": about, "parameters": parameters, "responses": _RESPONSES}
        if (model := _BODIES.get(route.path)) is not None:
            content = {"application/json": {"schema": {"$ref": f"{_PLACE}{model.__name__}"}}}
            operation["requestBody"] = {"required": True, "content": content}
        yield method.lower(), operation


def field_rows(schema: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name, type and meaning of each field of an object, given its JSON schema."""
    required = schema.get("required", ())
    return [
        (name, kind_of(each), ("Required. " if name in required else "") + each.get("description", ""))
        for name, each in schema.get("properties", {}).items()
    ]


def kind_of(schema: Mapping[str, Any]) -> str:
    """Return the type of a value with its bounds, in words, given its JSON schema."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_PLACE)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return " or ".join(dict.fromkeys(kind_of(each) for each in schema[name] if each.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    match schema.get("type"):
        case "array":
            return f"list{_within(schema, 'minItems', 'maxItems', ' entries')}: {kind_of(schema['items'])}"
        case "string":
            return f"string{_within(schema, 'minLength', 'maxLength', ' characters')}"
        case "integer" | "number" as name:
            return f"{name}{_within(schema, 'minimum', 'maximum')}"
    return str(schema.get("type", "any value"))


def _within(schema: Mapping[str, Any], low: str, high: str, unit: str = "") -> str:
    """Return the limits in words, without those of a 32-bit or 64-bit integer."""
    least, most = (schema[name] if abs(schema.get(name, LARGEST)) < LARGEST else None for name in (low, high))
    if most is None:
        return "" if least is None else f" from {least:g}{unit}"
    return f" up to {most:g}{unit}" if least is None else f" from {least:g} to {most:g}{unit}"


def page(described: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document: each route, and the fields of each object."""
    parts = [f"<h1>{escape(described['info']['title'])}</h1>"]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].removeprefix(_PLACE)
                parts.append(f'<p>Body: <a href="#{name}">{name}</a></p>')
    for name, schema in described["components"]["schemas"].items():
        about = escape(schema.get("description", ""))
        parts.append(f'<h2 id="{name}">{name}</h2><p>{about}</p>{_table(field_rows(schema))}')
    return f'<!doctype html><html lang="en"><title>SplitServe: HTTP API</title>{"".join(parts)}</html>'


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{each}</tr>" for each in cells)
    return f'<table border="1" cellpadding="4"><tr><th>field</th><th>type</th><th></th></tr>{body}</table>'
