"""OpenAI's embeddings, vectors of length 1; and reranking as Cohere, Jina and vLLM have it.

One route under three paths takes the bodies of all APIs for reranking, and its answer has the fields of all; errors are in
OpenAI's format, as vLLM's are. A text to embed that is too long is refused, as OpenAI does, a document is cut; `truncate`,
which is not OpenAI's, changes either.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from bough.errors import RequestError
from bough.server.apis.answering import SaltOf, ServiceOf
from bough.server.apis.openai.wire import Name, format_error, make_id, read_texts
from bough.server.http import bounds
from bough.server.http.json_routes import Wire, read_ask, route_class
from bough.server.http.streaming import cancel_on_disconnect
from bough.server.http.vectors import list_response, write_base64, write_numbers
from bough.server.serving.embedding import EmbedAsk, Ranking, RerankAsk

router = APIRouter(route_class=route_class(format_error))


class OpenAIEmbeddingsRequest(Wire):
    """The body. `input` is a text, a list of texts, token ids, or a list of lists of token ids."""

    model: Name
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Annotated[str, bounds.SHORT_NAME] | None = None  # not used
    truncate: bool | None = None


def to_embed_ask(body: OpenAIEmbeddingsRequest, salt: str) -> EmbedAsk:
    """The ask of a body. Raises RequestError for an invalid input."""
    inputs = read_texts(body.input, "input", bounds.MAX_TEXTS)
    return EmbedAsk(body.model, inputs, truncates=bool(body.truncate), dimensions=body.dimensions, salt=salt)


@router.post("/v1/embeddings", tags=["OpenAI"])
async def embed(body: OpenAIEmbeddingsRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The vectors of texts."""
    ask = await read_ask(request, to_embed_ask, body, salt)
    vectors = await cancel_on_disconnect(request, service.embeddings.embed(ask))
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    fields = {"object": "list", "model": body.model, "usage": usage}
    write = write_base64 if body.encoding_format == "base64" else write_numbers
    entries = (f'{{"object":"embedding","index":{i},"embedding":{write(each)}}}' for i, each in enumerate(vectors))
    return list_response(fields, "data", entries)


class RerankRequest(Wire):
    """The body. A document is a text, or an object with a `text`."""

    model: Name
    query: Annotated[str, Field(min_length=1), bounds.no_longer_than(bounds.MAX_QUERY_CHARACTERS)]
    documents: Annotated[list[Any], Field(min_length=1), bounds.FAIL_FAST, bounds.at_most(bounds.MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    rank_fields: Any = None
    truncate: bool | None = None


def to_rerank_ask(body: RerankRequest, salt: str) -> RerankAsk:
    """The ask of a body. Raises RequestError for documents that have no text."""
    if body.rank_fields not in (None, ["text"]):
        raise RequestError("rank_fields is not supported but for ['text']: send the documents as texts")
    texts: list[str] = []
    for number, document in enumerate(body.documents):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            given = bounds.show(document)
            raise RequestError(f"documents[{number}] is {given}, and must be a text or an object with a text")
        texts.append(text)
    return RerankAsk(body.model, body.query, texts, body.top_n, truncates=body.truncate is not False, salt=salt)


@router.post("/v1/rerank", tags=["rerank"])
@router.post("/v2/rerank", tags=["rerank"])
@router.post("/rerank", tags=["rerank"])
async def rerank(body: RerankRequest, request: Request, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """The documents that answer a query best, the best first."""
    ask = to_rerank_ask(body, salt)
    ranking = await cancel_on_disconnect(request, service.embeddings.rerank(ask))
    return await asyncio.to_thread(lambda: JSONResponse(_write_ranking(ranking, ask, body)))


def _write_ranking(ranking: Ranking, ask: RerankAsk, body: RerankRequest) -> dict[str, Any]:
    """The answer: `meta` is Cohere's, `usage` is Jina's and vLLM's."""
    results: list[dict[str, Any]] = [{"index": each.index, "relevance_score": each.score} for each in ranking.ranked]
    if body.return_documents:
        results = [each | {"document": {"text": ask.documents[each["index"]]}} for each in results]
    tokens = {"input_tokens": ranking.num_tokens, "output_tokens": 0}
    return {
        "id": make_id("rerank-"),
        "model": ask.model,
        "results": results,
        "usage": {"prompt_tokens": ranking.num_tokens, "total_tokens": ranking.num_tokens},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens},
    }
