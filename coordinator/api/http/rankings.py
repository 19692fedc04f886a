"""Convert calls of /v1/score and /v1/rerank to Score requests, and their results to responses. Performs no I/O.

A document's score is the probability that the model replies yes, of yes and no, when asked whether it is relevant.
"""

from collections.abc import Sequence
from typing import Final

from coordinator.api.http.api_adapters import Object
from coordinator.api.http.decisions import NO, USER, YES, chat_of, odds_of, score_request
from coordinator.api.http.decisions_models import RerankRequest, ScorePairsRequest
from coordinator.api.validation import bad
from protos.inference_pb2 import ChatMessage, ScoreItem, ScoreRequest, ScoreResponse

RELEVANT: Final = "Given a search query, find the passages that answer it"
JUDGE: Final = (
    f'Say whether the Document is what the Instruct wants for the Query. Answer with "{YES}" or "{NO}" alone.'
)
ROLES: Final = ("query", "document")  # of chat templates that are made for rerankers


def parse_pairs(request: ScorePairsRequest, request_id: str, template: str) -> list[ScoreRequest]:
    """Return the Score requests of a call of /v1/score, one for each query. Raises RequestError."""
    queries = _pair_field(request, "text_1", "queries")
    documents = _pair_field(request, "text_2", "documents")
    if len(queries) == 1:
        return [_ranking(request, request_id, queries[0], documents, template)]
    if len(queries) != len(documents):
        raise bad("text_1", f"has {len(queries)} entries and text_2 {len(documents)}: send one, or as many")
    pairs = zip(queries, documents, strict=True)
    return [_ranking(request, f"{request_id}-{n}", query, [each], template) for n, (query, each) in enumerate(pairs)]


def _pair_field(request: ScorePairsRequest, old: str, new: str) -> list[str]:
    given = [value for name in (old, new) if (value := getattr(request, name)) is not None]
    if len(given) != 1:
        raise bad(
            old, f"is missing: send it, or {new}" if not given else f"cannot be had beside {new}: send one of them"
        )
    return [given[0]] if isinstance(given[0], str) else given[0]


def parse_rerank(request: RerankRequest, request_id: str, template: str) -> list[ScoreRequest]:
    """Return the Score request of a call of /v1/rerank. Raises RequestError."""
    return [_ranking(request, request_id, request.query, request.documents, template)]


def _ranking(
    request: ScorePairsRequest | RerankRequest, request_id: str, query: str, documents: Sequence[str], template: str
) -> ScoreRequest:
    """Return the Score request for documents of one query.

    A chat template that knows the roles of ROLES writes the prompt; else it is Qwen3-Reranker's frame of tags.
    """
    if all(f'"{role}"' in template or f"'{role}'" in template for role in ROLES):
        messages = [ChatMessage(role=role, content=text) for role, text in zip(ROLES, (query, ""), strict=True)]
        if request.instruction:
            messages.insert(0, ChatMessage(role="system", content=request.instruction))
    else:
        content = f"<Instruct>: {request.instruction or RELEVANT}\n<Query>: {query}\n<Document>: "
        messages = [ChatMessage(role="system", content=JUDGE), ChatMessage(role=USER, content=content)]
    items = [ScoreItem(text=each, labels=[YES, NO]) for each in documents]
    return score_request(request, request_id, chat_of(request.chat_template_kwargs, messages), items)


def relevances(responses: Sequence[ScoreResponse]) -> list[float]:
    """Return the probability that each document is relevant; 0 where neither reply can come."""
    odds = [odds_of(item.logprobs) for response in responses for item in response.items]
    return [0.0 if each is None else each.probabilities[0] for each in odds]


def score_body(request: ScorePairsRequest, responses: Sequence[ScoreResponse], model: str) -> Object:
    """Return the response of /v1/score, in vLLM's format."""
    data = [{"index": n, "object": "score", "score": each} for n, each in enumerate(relevances(responses))]
    return {
        "id": f"score-{responses[0].request_id}",
        "object": "list",
        "model": model,
        "data": data,
        "usage": _usage(responses),
    }


def rerank_body(request: RerankRequest, responses: Sequence[ScoreResponse], model: str) -> Object:
    """Return the response of /v1/rerank, in Jina's and vLLM's format: the most relevant document first."""
    scores = relevances(responses)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    shows = request.return_documents is not False
    results = [
        {
            "index": index,
            **({"document": {"text": request.documents[index]}} if shows else {}),
            "relevance_score": scores[index],
        }
        for index in ranked
    ]
    return {"id": f"rerank-{responses[0].request_id}", "model": model, "results": results, "usage": _usage(responses)}


def _usage(responses: Sequence[ScoreResponse]) -> Object:
    num_tokens = sum(each.prompt_tokens for each in responses)
    details = {"cached_tokens": sum(each.cached_tokens for each in responses)}
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "prompt_tokens_details": details}


RANKING_NAMES: Final = {
    "items": "documents",
    "chat": "query",
    "chat.template_kwargs_json": "chat_template_kwargs",
}
"""Fields of both endpoints by those of a Score request, for errors."""
