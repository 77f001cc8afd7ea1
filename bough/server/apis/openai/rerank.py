"""Reranking as Cohere, Jina and vLLM have it: documents sorted by how well they answer a query.

One route under three paths takes the bodies of all of them, and its answer has the fields of all. Errors are in OpenAI's
format, as vLLM's are. A document that is too long is cut unless `truncate` is false.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from bough.errors import RequestError
from bough.server.apis.openai.wire import Name, format_error, make_id
from bough.server.http.bounds import FAIL_FAST, MAX_DOCUMENTS, MAX_QUERY_CHARACTERS, at_most, no_longer_than, show
from bough.server.http.streaming import cancel_on_disconnect
from bough.server.http.wire import SaltOf, ServiceOf, Wire, route_class
from bough.server.serving.embedding.service import Ranking, RerankAsk

router = APIRouter(route_class=route_class(format_error), tags=["rerank"])


class RerankRequest(Wire):
    """The body. A document is a text, or an object with a `text`."""

    model: Name
    query: Annotated[str, Field(min_length=1), no_longer_than(MAX_QUERY_CHARACTERS)]
    documents: Annotated[list[Any], Field(min_length=1), FAIL_FAST, at_most(MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    rank_fields: Any = None
    truncate: bool | None = None

    def texts(self) -> list[str]:
        """The texts of the documents. Raises RequestError for a document that has none."""
        if self.rank_fields not in (None, ["text"]):
            raise RequestError("rank_fields is not supported but for ['text']: send the documents as texts")
        return [_text_of(document, number) for number, document in enumerate(self.documents)]


def _text_of(document: Any, number: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise RequestError(f"documents[{number}] is {show(document)}, and must be a text or an object with a text")
    return text


def to_ask(body: RerankRequest, salt: str) -> RerankAsk:
    """Raises RequestError for documents that have no text."""
    return RerankAsk(body.model, body.query, body.texts(), body.top_n, truncates=body.truncate is not False, salt=salt)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(body: RerankRequest, request: Request, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """The documents that answer a query best, the best first."""
    ask = to_ask(body, salt)
    ranking = await cancel_on_disconnect(request, service.embeddings.rerank(ask))
    has_documents = bool(body.return_documents)
    return await asyncio.to_thread(lambda: JSONResponse(write_ranking(ranking, ask, has_documents=has_documents)))


def write_ranking(ranking: Ranking, ask: RerankAsk, *, has_documents: bool) -> dict[str, Any]:
    """The answer: `meta` is Cohere's, `usage` is Jina's and vLLM's."""
    results: list[dict[str, Any]] = [{"index": each.index, "relevance_score": each.score} for each in ranking.ranked]
    if has_documents:
        results = [each | {"document": {"text": ask.documents[each["index"]]}} for each in results]
    tokens = {"input_tokens": ranking.num_tokens, "output_tokens": 0}
    return {
        "id": make_id("rerank-"),
        "model": ask.model,
        "results": results,
        "usage": {"prompt_tokens": ranking.num_tokens, "total_tokens": ranking.num_tokens},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens},
    }
