"""The tables of docs/reference/api.md: `python -m tests.api_table` writes them anew.

Services and messages are those of protos/inference.proto with its comments, routes those of the application, statuses
those that the API servers give each reason. What only people can say of a route or a reason stands here.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    SourceCodeInfo,
)
from grpc_tools import protoc
from starlette.routing import Route

from coordinator.api.http.app import Endpoints
from coordinator.api.http.errors import error_object, status_of
from coordinator.api.http.middleware import OPEN_PATHS
from coordinator.api.http.page import Page
from coordinator.api.statuses import CODES, RETRY_DELAY_S, to_status
from serving_core import reasons
from serving_core.errors import RequestError
from tests.doc_table import DOCS, page_with

PAGE: Final = DOCS / "reference" / "api.md"
PROTO: Final = "protos/inference.proto"
PACKAGE: Final = ".splitserve.v1."
SERVICES, MESSAGES = 6, 4  # fields of FileDescriptorProto, as its paths have them
PARTS: Final = 2  # the methods and fields of a service or message
SHOWN: Final = ("Timeline",)  # messages whose fields the page lists; protos/inference.proto has all with comments

ABOUT_ROUTES: Final = {
    "/v1/models": "the model and its LoRA adapters, as OpenAI lists them, with `max_model_len` and `vocab_size`",
    "/v1/models/{model:path}": "one of them",
    "/v1/completions": "OpenAI's completions, streamed or whole",
    "/v1/chat/completions": "OpenAI's chat completions, streamed or whole",
    "/v1/chat/completions/batch": "one completion of each of up to 256 conversations",
    "/v1/responses": "OpenAI's responses ([what of it](../guides/clients.md#openais-and-anthropics-apis))",
    "/v1/messages": "Anthropic's messages ([what of it](../guides/clients.md#openais-and-anthropics-apis))",
    "/v1/messages/count_tokens": "how many tokens such a call would have: `input_tokens`",
    "/inference/v1/generate": "token ids in and out, vLLM's call ([what for](../guides/clients.md#token-ids))",
    "/v1/completions/render": "what a completion sends to the model: a list of bodies for `/inference/v1/generate`",
    "/v1/chat/completions/render": "what a chat completion sends to the model: a body for `/inference/v1/generate`",
    "/v1/responses/render": "the same of a call of `/v1/responses`",
    "/v1/messages/render": "the same of a call of `/v1/messages`",
    "/v1/load_lora_adapter": "loads a LoRA adapter on every node ([how](../guides/models.md#lora-adapters))",
    "/v1/unload_lora_adapter": "unloads one, when no request runs with it any more",
    "/v1/embeddings": "OpenAI's embeddings, of a [model that makes some](../guides/clients.md#embeddings)",
    "/v1/decisions": "OpenAI's [decisions](../guides/clients.md#decisions): probabilities for questions",
    "/v1/systemone": "the same in the format of TypeSafe's System One",
    "/v1/score": "how relevant documents are for queries ([scores](../guides/clients.md#decisions)), as vLLM has it",
    "/v1/rerank": "documents by how relevant they are for a query, as Jina and vLLM have it",
    "/tokenize": "the tokens of a prompt or a conversation: `count`, `max_model_len`, `tokens`, `token_strs`",
    "/detokenize": "the text of tokens: `prompt`",
    "/tokenizer_info": "the tokenizer's configuration, as the model's folder has it",
    "/load": "sequences under way: `server_load`",
    "/health": "200 while requests can be answered, else 503; `?node=NAME`: while this node takes them",
    "/ready": "200 and `ready`, or 503 and the `reason`: which nodes are missing",
    "/ping": "as `/health`",
    "/invocations": "for Amazon SageMaker: a chat where the body has `messages`, else a completion, or embeddings",
    "/version": "`version`",
    "/openapi.json": "these routes and their fields as an OpenAPI document",
    "/docs": "the same as a page",
    "/metrics": "[metrics](metrics.md) for Prometheus",
    "/": "leads a browser, which asks for HTML, to the page; 404 for all others",
    "/ui": "[the page](../guides/observe.md#terminal-and-fleet-page)",
    "/ui/page.css": "a part of it",
    "/ui/page.js": "a part of it",
    "/ui/overview": "what it shows, an `Overview` as JSON; `?after=N` as in `GetOverviewRequest`",
}

ABOUT_REASONS: Final = {
    reasons.BAD_PARAM: "a field has a value that cannot be had; it is named",
    reasons.PROMPT_TOO_LONG: "prompt and output do not fit into the context, or one node's pool",
    reasons.MALFORMED_REQUEST: "what came is no such message, or no JSON object",
    reasons.MODEL_NOT_FOUND: "neither the model's name nor an adapter's",
    reasons.NODE_NOT_FOUND: "no node has that name",
    reasons.NO_OTHER_NODE: "without this node nobody would prefill, or decode",
    reasons.DRAIN_ENDED: "the node that was to be empty was given a role meanwhile",
    reasons.DUPLICATE_REQUEST_ID: "a live request has that id",
    reasons.QUEUE_FULL: "a queue or a cap is full, or the machine too busy",
    reasons.WOULD_BE_LATE: "its limits on time cannot be kept now (`--admission timely`)",
    reasons.SLOW_READER: "the client did not read its output, and too much of it waited",
    reasons.NO_PREFILL_WORKER: "no node prefills, and none came within `--node-wait-s`; or none has come yet that "
    "knows the adapter",
    reasons.NO_DECODE_WORKER: "no node decodes, and none came within `--node-wait-s`",
    reasons.ABORTED: "`Abort` has ended it, before there was output to end with",
    reasons.DRAINING: "the server, or the node, is stopping",
    reasons.WORKER_LOST: "nodes failed it more often than `--max-restarts` allows",
    reasons.KV_CHECKSUM_MISMATCH: "its KV kept arriving damaged; no token was made of it",
    reasons.PAIRING_MISMATCH: "two nodes do not fit together",
    reasons.ENGINE_ERROR: "a fault of the server's; its log says which",
    reasons.DEADLINE_EXCEEDED: "the time of the request, or of the server (`--request-timeout-s`), is over",
    reasons.UNAUTHENTICATED: "the API key is missing or wrong",
}


def routes() -> list[Route]:
    """Every route of the application; none is called."""
    nothing: Any = None
    page = object.__new__(Page)
    page._files = dict.fromkeys(OPEN_PATHS, b"")
    return [*Endpoints(nothing, nothing, nothing, nothing).described(), *page.routes()]


def route_table() -> list[str]:
    lines = ["| route | |", "|---|---|"]
    for route in sorted(routes(), key=lambda route: route.path):
        methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
        key = " No key needed." if route.path in OPEN_PATHS else ""
        lines.append(_row(f"`{methods} {route.path.replace(':path', '')}`", f"{ABOUT_ROUTES[route.path]}.{key}"))
    return lines


def reason_table() -> list[str]:
    """A row for each reason with its code in gRPC, its status over HTTP, and what OpenAI's API calls it."""
    lines = ["| reason | gRPC | HTTP | `code` | try again | |", "|---|---|---|---|---|---|"]
    for reason, code in CODES.items():
        error = RequestError(reason, "any")
        named = error_object(error)["error"]["code"]
        again = f"after {RETRY_DELAY_S} s or as told" if _says_when(error) else ""
        openais = f"`{named}`" if named != reason else ""
        lines.append(_row(f"`{reason}`", code.name, str(status_of(error).value), openais, again, ABOUT_REASONS[reason]))
    return lines


def _says_when(error: RequestError) -> bool:
    details = dict(to_status(error).trailing_metadata)["grpc-status-details-bin"]
    return b"google.rpc.RetryInfo" in details


class Proto:
    """A .proto file with the comments of its source."""

    def __init__(self, path: str = PROTO) -> None:
        with tempfile.NamedTemporaryFile() as out:
            arguments = ["protoc", f"-I{DOCS.parent}", "--include_source_info", f"--descriptor_set_out={out.name}"]
            assert protoc.main([*arguments, str(DOCS.parent / path)]) == 0, path
            [self.file] = FileDescriptorSet.FromString(Path(out.name).read_bytes()).file
        self._locations = {tuple(each.path): each for each in self.file.source_code_info.location}

    def about(self, *path: int) -> str:
        """What the comments before and behind it say, in one line."""
        location = self._locations.get(path, SourceCodeInfo.Location())
        before, behind = (" ".join(said.split()) for said in (location.leading_comments, location.trailing_comments))
        return f"{before.rstrip('.')}: {behind}" if before and behind else before or behind

    def parts(self) -> Iterator[str]:
        """The lines of all services, messages and enums."""
        file: FileDescriptorProto = self.file
        for i, service in enumerate(file.service):
            yield from ("", f"### {service.name}", "", self.about(SERVICES, i), "")
            yield from ("| method | response | |", "|---|---|---|")
            for j, method in enumerate(service.method):
                stream = "stream of " if method.server_streaming else ""
                response = f"{stream}`{method.output_type.removeprefix(PACKAGE)}`"
                yield _row(f"`{method.name}`", response, self.about(SERVICES, i, PARTS, j))
        for i, message in enumerate(file.message_type):
            if message.name in SHOWN:
                yield from ("", f"### {message.name}", "", self.about(MESSAGES, i), "", *self._fields(message, i))

    def _fields(self, message: DescriptorProto, i: int) -> Iterator[str]:
        yield from ("| field | |", "|---|---|")
        for j, field in enumerate(message.field):
            yield _row(f"`{field.name}`", self.about(MESSAGES, i, PARTS, j))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table() -> str:
    """The part of the page between the marks."""
    lines = ["", "## Routes over HTTP", "", *route_table()]
    lines += ["", "## Reasons and statuses", "", *reason_table()]
    lines += ["", "## gRPC", *Proto().parts()]
    text = "\n".join(lines) + "\n\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def page() -> str:
    """The whole page, with the tables as they ought to be."""
    return page_with(table(), PAGE, "tests.api_table")


if __name__ == "__main__":
    PAGE.write_text(page())
