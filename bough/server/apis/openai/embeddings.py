"""OpenAI's embeddings: texts, or texts as token ids, to vectors of length 1.

As there, a text that is too long is refused. `truncate` is not OpenAI's: with it such a text is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from bough.server.apis.openai.wire import Name, format_error, read_texts
from bough.server.http.bounds import MAX_TEXTS, SHORT_NAME
from bough.server.http.streaming import cancel_on_disconnect
from bough.server.http.vectors import list_response, write_base64, write_numbers
from bough.server.http.wire import SaltOf, ServiceOf, Wire, route_class
from bough.server.serving.embedding.service import EmbedAsk, Vectors

router = APIRouter(route_class=route_class(format_error), tags=["OpenAI"])


class EmbeddingsRequest(Wire):
    """The body. `input` is a text, a list of texts, token ids, or a list of lists of token ids."""

    model: Name
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Annotated[str, SHORT_NAME] | None = None  # not used
    truncate: bool | None = None


def to_ask(body: EmbeddingsRequest, salt: str) -> EmbedAsk:
    """Raises RequestError for an input that is none."""
    inputs = read_texts(body.input, "input", MAX_TEXTS)
    return EmbedAsk(body.model, inputs, truncates=bool(body.truncate), dimensions=body.dimensions, salt=salt)


@router.post("/v1/embeddings")
async def embed(body: EmbeddingsRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The vectors of texts."""
    ask = await asyncio.to_thread(to_ask, body, salt)
    vectors = await cancel_on_disconnect(request, service.embeddings.embed(ask))
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    fields = {"object": "list", "model": body.model, "usage": usage}
    return list_response(fields, "data", _write_entries(vectors, body.encoding_format == "base64"))


def _write_entries(vectors: Vectors, is_base64: bool) -> Iterator[str]:
    write = write_base64 if is_base64 else write_numbers
    for number, vector in enumerate(vectors):
        yield f'{{"object":"embedding","index":{number},"embedding":{write(vector)}}}'
