"""Ollama's API for embeddings: /api/embed, and the older /api/embeddings, which takes one text and does not normalise.

Without a text both load the model, or unload it if keep_alive is 0. Options are checked, and none of them has an effect.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from bough.server.apis.ollama.wire import KeepAlive, NamedRequest, Options, Whole, nanoseconds, to_list
from bough.server.http.bounds import FAIL_FAST, MAX_TEXTS, at_most
from bough.server.http.errors import format_plain_error
from bough.server.http.streaming import cancel_on_disconnect
from bough.server.http.vectors import list_response, write_numbers
from bough.server.http.wire import SaltOf, ServiceOf, route_class
from bough.server.serving.embedding.service import EmbedAsk
from bough.server.serving.service import Service

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])

Texts = Annotated[list[str], FAIL_FAST, at_most(MAX_TEXTS)]


class VectorRequest(NamedRequest):
    """The fields that both routes have."""

    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbedRequest(VectorRequest):
    """The body of /api/embed. A `dimensions` of 0 means all of them."""

    input: Annotated[Texts | None, BeforeValidator(to_list, json_schema_input_type=list[str] | str | None)] = None
    truncate: bool | None = None
    dimensions: Annotated[Whole, Field(ge=0)] | None = None

    def to_ask(self, salt: str) -> EmbedAsk:
        return EmbedAsk(
            self.wanted,
            self.input or (),
            truncates=self.truncate is not False,
            dimensions=self.dimensions or None,
            keep_alive_s=self.keep_alive,
            salt=salt,
        )


class EmbeddingsRequest(VectorRequest):
    """The body of /api/embeddings."""

    prompt: str | None = None

    def to_ask(self, salt: str) -> EmbedAsk:
        texts = [self.prompt] if self.prompt else []
        return EmbedAsk(self.wanted, texts, normalizes=False, keep_alive_s=self.keep_alive, salt=salt, field="prompt")


@router.post("/api/embed")
async def embed(body: EmbedRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The vectors of one text or of several, each of length 1."""
    began_s, ask = time.perf_counter(), body.to_ask(salt)
    if not ask.inputs:
        await cancel_on_disconnect(request, _load(ask, service))
        return JSONResponse({"model": ask.model, "embeddings": []})
    vectors = await cancel_on_disconnect(request, service.embeddings.embed(ask))
    fields: dict[str, Any] = {
        "model": ask.model,
        "total_duration": nanoseconds(time.perf_counter() - began_s),
        "load_duration": nanoseconds(vectors.load_s),
        "prompt_eval_count": vectors.num_tokens,
    }
    return list_response(fields, "embeddings", map(write_numbers, vectors))


@router.post("/api/embeddings")
async def embed_one(body: EmbeddingsRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The vector of one text, as the model gives it."""
    ask = body.to_ask(salt)
    if not ask.inputs:
        await cancel_on_disconnect(request, _load(ask, service))
        return JSONResponse({"embedding": []})
    (vector,) = await cancel_on_disconnect(request, service.embeddings.embed(ask))
    return Response(f'{{"embedding":{write_numbers(vector)}}}', media_type="application/json")


async def _load(ask: EmbedAsk, service: Service) -> None:
    if ask.keep_alive_s == 0:
        await service.unload(ask.model)
    else:
        await service.load(ask.model, ask.keep_alive_s)
