"""Ollama's API for models: list, show, pull, copy and delete.

What Bough does not support (embeddings, making and publishing models) is refused with a status below 500 and the reason.
Everything that touches files runs in a thread, so that it does not delay streams.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from bough import models
from bough.errors import ModelNotFound, RequestError, Unavailable
from bough.models.defaults import NEUTRAL
from bough.models.store import plain_name
from bough.server.apis.ollama.pull import fetch, pull_lines
from bough.server.apis.ollama.wire import DEFAULTS, CopyRequest, NamedRequest, PullRequest, write_time
from bough.server.http.errors import format_plain_error
from bough.server.http.streaming import NDJSON, cancel_on_disconnect, to_json
from bough.server.http.wire import ServiceOf, route_class
from bough.server.serving.catalog import CatalogEntry, LoadedEntry
from bough.server.serving.service import Service

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])

FOR_EVER = datetime(2318, 1, 1, tzinfo=UTC)
"""The date that clients see for a model that never expires."""


@router.get("/", response_class=PlainTextResponse)
@router.head("/", include_in_schema=False)
async def greet() -> Response:
    """Say that there is a server: clients look for this text."""
    return PlainTextResponse("Ollama is running")


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def tell_version() -> Response:
    """The version of Bough."""
    return JSONResponse({"version": version("bough")})


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def list_models(service: ServiceOf) -> Response:
    """The models on this machine."""
    found = await asyncio.to_thread(service.catalog.list)
    return JSONResponse({"models": [{**_write(entry), "modified_at": write_time(entry.modified)} for entry in found]})


@router.get("/api/ps")
async def list_loaded(service: ServiceOf) -> Response:
    """The models that are loaded."""
    return JSONResponse({"models": [_write_loaded(each) for each in service.models.describe()]})


@router.post("/api/show")
async def show(body: NamedRequest, service: ServiceOf) -> Response:
    """The details of one model."""
    entry = await _find(service, body.wanted)
    return JSONResponse(
        {
            "modelfile": _write_modelfile(entry),
            "parameters": _write_parameters(entry),
            "template": entry.template,
            "license": entry.license,
            "details": _write_details(entry),
            "model_info": _write_info(entry),
            "capabilities": list(entry.capabilities),
            "modified_at": write_time(entry.modified),
        }
    )


@router.post("/api/pull")
async def pull(body: PullRequest, request: Request, service: ServiceOf) -> Response:
    """Download a model and stream the progress. A model that is here already is not downloaded again."""
    name = body.wanted
    is_here = await _is_here(service, name)
    if not is_here and not models.can_pull(name):
        raise ModelNotFound(f"pull model manifest: file does not exist: nothing is known of {name!r}")
    if body.stream is not False:
        return StreamingResponse(pull_lines(name, service.catalog, is_here), media_type=NDJSON)
    if not is_here:
        await cancel_on_disconnect(request, fetch(name, service.catalog))
    return JSONResponse({"status": "success"})


@router.post("/api/copy")
async def copy(body: CopyRequest, service: ServiceOf) -> Response:
    """Give a model a second name."""
    source = await _find(service, body.source)
    try:
        target = plain_name(body.destination)
    except ModelNotFound as error:
        raise RequestError(f"destination: {error}") from error
    if target != source.name:
        await asyncio.to_thread(service.catalog.copy, source.name, target)
    return Response()


@router.delete("/api/delete")
async def delete(body: NamedRequest, service: ServiceOf) -> Response:
    """Delete a model. If it is loaded, it is unloaded first."""
    entry = await _find(service, body.wanted)
    if not await service.unload(entry.name):
        raise Unavailable(f"model '{entry.name}' is in use: it can be deleted when its answers have ended")
    await asyncio.to_thread(service.catalog.remove, entry.name)
    return Response()


@router.post("/api/embed")
@router.post("/api/embeddings")
async def embed(body: NamedRequest, service: ServiceOf) -> Response:
    """Refused: embeddings are not supported."""
    entry = await _find(service, body.wanted)
    raise RequestError(f"{entry.name} does not support embeddings")


@router.post("/api/create")
@router.post("/api/push")
async def refuse_publishing() -> Response:
    """Refused: models are fetched with /api/pull, or put into the folder of models."""
    raise RequestError("making and publishing models is not supported: use /api/pull and /api/copy")


@router.post("/api/blobs/{digest}")
async def refuse_blob(digest: str) -> Response:
    """Refused: making models is not supported."""
    raise RequestError("making models is not supported, so no files are taken")


@router.head("/api/blobs/{digest}", include_in_schema=False)
async def find_blob(digest: str) -> Response:
    return Response(status_code=404)


async def _find(service: Service, name: str) -> CatalogEntry:
    return await asyncio.to_thread(service.catalog.find, name)


async def _is_here(service: Service, name: str) -> bool:
    try:
        await _find(service, name)
    except ModelNotFound:
        return False
    return True


def _write(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model": entry.name,
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": _write_details(entry),
    }


def _write_details(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": entry.format,
        "family": entry.family,
        "families": list(entry.families),
        "parameter_size": entry.parameter_size,
        "quantization_level": entry.quantization,
    }


def _write_loaded(loaded: LoadedEntry) -> dict[str, Any]:
    return {
        **_write(loaded.entry),
        "size": loaded.num_bytes,
        "size_vram": loaded.device_bytes,
        "expires_at": write_time(loaded.expires_at or FOR_EVER),
        "context_length": loaded.context_tokens,
        "engine": loaded.engine,
    }


def _write_info(entry: CatalogEntry) -> dict[str, Any]:
    """The keys of a GGUF file, which clients read."""
    family = entry.family
    return {
        "general.architecture": family,
        "general.basename": entry.name,
        "general.parameter_count": entry.num_parameters,
        f"{family}.context_length": entry.context_tokens,
        f"{family}.embedding_length": entry.embedding_length,
    }


def _write_parameters(entry: CatalogEntry) -> str:
    """The options of a request that gives none, one per line: the model's own, or else those of the API."""
    neutral = {name: NEUTRAL[name] for name in DEFAULTS}
    sampling = {**neutral, **entry.sampling} if entry.sampling else DEFAULTS
    values = [(name, each) for name, value in sampling.items() for each in _each(value)]
    return "\n".join(f"{name:<30} {value}" for name, value in [("num_ctx", entry.context_tokens), *values])


def _each(value: Any) -> list[Any]:
    """The values to write, each on a line of its own: stop strings are several, and quoted."""
    texts = [value] if isinstance(value, str) else value
    return [to_json(text) for text in texts] if isinstance(texts, list | tuple) else [value]


def _write_modelfile(entry: CatalogEntry) -> str:
    lines = [f"PARAMETER {line}" for line in _write_parameters(entry).splitlines()]
    return "\n".join([f"FROM {entry.name}", f'TEMPLATE """{entry.template}"""', *lines, ""])
