"""Ollama's API for models: list, show, pull, copy and delete. Names are listed with their tag.

What Bough does not support (publishing models, files of models) is refused with a status below 500 and the
reason.
Everything that touches files runs in a thread, so that it does not delay streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from bough import models
from bough.errors import ModelNotFound, RequestError, Unavailable
from bough.models.aliases import Overlay
from bough.models.defaults import NEUTRAL
from bough.models.store import plain_name, tagged_name
from bough.server.apis.ollama.modelfile import write_modelfile, write_parameters
from bough.server.apis.ollama.pull import fetch, pull_lines
from bough.server.apis.ollama.wire import DEFAULTS, CopyRequest, NamedRequest, PullRequest, write_time
from bough.server.http.errors import format_plain_error
from bough.server.http.streaming import NDJSON, cancel_on_disconnect
from bough.server.http.wire import ServiceOf, route_class
from bough.server.serving.catalog import CatalogEntry, LoadedEntry
from bough.server.serving.service import Service
from bough.system.distribution import VERSION

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])

OLLAMA_VERSION = "0.14.2"
"""The version of Ollama whose API this is. Some clients refuse an older one: VS Code asks for 0.6.4, others for 0.14.2."""

FOR_EVER = datetime(2318, 1, 1, tzinfo=UTC)
"""The date that clients see for a model that never expires."""


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def tell_version() -> Response:
    """The version of Ollama whose API this is, and that of Bough."""
    return JSONResponse({"version": OLLAMA_VERSION, "bough": VERSION})


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def list_models(service: ServiceOf) -> Response:
    """The models on this machine."""
    found = await asyncio.to_thread(service.catalog.list)
    return JSONResponse({"models": [{**_write(entry), "modified_at": write_time(entry.modified)} for entry in found]})


@router.get("/api/ps")
async def list_loaded(service: ServiceOf) -> Response:
    """The models that are loaded, each once, with its other names."""
    loaded = service.models.describe()
    aliases = await asyncio.to_thread(lambda: [service.catalog.aliases_of(each.entry.name) for each in loaded])
    found = [_write_loaded(each, names) for each, names in zip(loaded, aliases, strict=True)]
    return JSONResponse({"models": found})


@router.post("/api/show")
async def show(body: NamedRequest, service: ServiceOf) -> Response:
    """The details of one model."""
    entry = await _find(service, body.wanted)
    parameters = _parameters_of(entry)
    return JSONResponse(
        {
            "modelfile": write_modelfile(entry.stands_for or entry.name, entry.template, parameters, entry.overlay),
            "parameters": write_parameters(parameters),
            "template": entry.template,
            "license": entry.license,
            **_write_overlay(entry.overlay),
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
    is_here = await asyncio.to_thread(service.catalog.has_name, name)
    if not is_here and not models.can_pull(name):
        raise ModelNotFound(f"pull model manifest: file does not exist: nothing is known of {name!r}")
    if body.stream is not False:
        return StreamingResponse(pull_lines(name, service.catalog, is_here), media_type=NDJSON)
    if not is_here:
        await cancel_on_disconnect(request, fetch(name, service.catalog))
    return JSONResponse({"status": "success"})


@router.post("/api/copy")
async def copy(body: CopyRequest, service: ServiceOf) -> Response:
    """Give a model another name. It stays one model, with one tree."""
    source = await _find(service, body.source)
    try:
        target = plain_name(body.destination)
    except ModelNotFound as error:
        raise RequestError(f"destination: {error}") from error
    if target != source.name:
        await asyncio.to_thread(service.catalog.copy, body.source, target)
    return Response()


@router.delete("/api/delete")
async def delete(body: NamedRequest, service: ServiceOf) -> Response:
    """Delete a model or an alias. A model that is loaded is unloaded first; its weights stay for its aliases."""
    name = body.wanted
    if await asyncio.to_thread(service.catalog.is_weights_name, name) and not await service.unload(name):
        raise Unavailable(f"model '{name}' is in use: it can be deleted when its answers have ended")
    await asyncio.to_thread(service.catalog.remove, name)
    return Response()


@router.post("/api/push")
async def refuse_publishing() -> Response:
    """Refused: models are fetched with /api/pull, or put into the folder of models."""
    raise RequestError("publishing models is not supported")


@router.post("/api/blobs/{digest}")
async def refuse_blob(digest: str) -> Response:
    """Refused: models are made from models that are here."""
    raise RequestError("files of models are not taken: /api/create makes a model from one that is here")


@router.head("/api/blobs/{digest}", include_in_schema=False)
async def find_blob(digest: str) -> Response:
    return Response(status_code=404)


async def _find(service: Service, name: str) -> CatalogEntry:
    return await asyncio.to_thread(service.catalog.find, name)


def _write(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": tagged_name(entry.name),
        "model": tagged_name(entry.name),
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": _write_details(entry),
    }


def _write_details(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "parent_model": tagged_name(entry.stands_for) if entry.stands_for else "",
        "format": entry.format,
        "family": entry.family,
        "families": list(entry.families),
        "parameter_size": entry.parameter_size,
        "quantization_level": entry.quantization,
    }


def _write_loaded(loaded: LoadedEntry, aliases: Sequence[str]) -> dict[str, Any]:
    return {
        **_write(loaded.entry),
        "size": loaded.num_bytes,
        "size_vram": loaded.device_bytes,
        "expires_at": write_time(loaded.expires_at or FOR_EVER),
        "context_length": loaded.context_tokens,
        "engine": loaded.engine,
        "weights": loaded.weights,
        "step": loaded.step,
        "aliases": [tagged_name(name) for name in aliases],
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


def _parameters_of(entry: CatalogEntry) -> dict[str, Any]:
    """The options of a request that gives none: those of a created model, then the model's own, or else the API's."""
    neutral = {name: NEUTRAL[name] for name in DEFAULTS}
    sampling = {**neutral, **entry.sampling} if entry.sampling else DEFAULTS
    return {"num_ctx": entry.context_tokens, **sampling, **entry.overlay.parameters}


def _write_overlay(overlay: Overlay) -> dict[str, Any]:
    """What a created model adds, without what it has not."""
    found = {"system": overlay.system, "messages": list(overlay.messages)}
    return {name: value for name, value in found.items() if value}
