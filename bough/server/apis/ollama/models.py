"""Ollama's API for models: list, show, pull, copy and delete. Names are listed with their tag.

What Bough does not support (publishing models, files of models) is refused with a status below 500 and the reason.
Everything that touches files runs in a thread, so that it does not delay streams. If a client disconnects during a pull,
the download ends at its next step; the downloaded part is kept for another try.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from bough import models
from bough.errors import DownloadError, ModelNotFound, RequestError, Unavailable
from bough.models.fetching.registry import KNOWN
from bough.models.store import plain_name, tagged_name
from bough.sampling_params import NEUTRAL
from bough.server.apis.answering import ServiceOf
from bough.server.apis.ollama.create import write_modelfile, write_parameters
from bough.server.apis.ollama.wire import DEFAULTS, CopyRequest, NamedRequest, PullRequest, write_time
from bough.server.http.errors import format_plain_error, to_http_error
from bough.server.http.json_routes import route_class
from bough.server.http.streaming import NDJSON, cancel_on_disconnect, json_line
from bough.server.serving.catalog import Catalog, CatalogEntry, human_number
from bough.system.distribution import VERSION

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])

OLLAMA_VERSION = "0.14.2"  # whose API this is; some clients refuse an older one: VS Code asks for 0.6.4, others for 0.14.2
FOR_EVER = datetime(2318, 1, 1, tzinfo=UTC)  # the date that clients see for a model that never expires
_LINE_EVERY_S = 0.1


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
    found = [
        {
            **_write(each.entry),
            "size": each.num_bytes,
            "size_vram": each.device_bytes,
            "expires_at": write_time(each.expires_at or FOR_EVER),
            "context_length": each.context_tokens,
            "engine": each.engine,
            "weights": each.weights,
            "step": each.step,
            "aliases": [tagged_name(name) for name in names],
        }
        for each, names in zip(loaded, aliases, strict=True)
    ]
    return JSONResponse({"models": found})


@router.post("/api/show")
async def show(body: NamedRequest, service: ServiceOf) -> Response:
    """The details of one model."""
    entry = await asyncio.to_thread(service.catalog.find, body.wanted)
    neutral = {name: NEUTRAL[name] for name in DEFAULTS}
    sampling = {**neutral, **entry.sampling} if entry.sampling else DEFAULTS
    parameters = {"num_ctx": entry.context_tokens, **sampling, **entry.overlay.parameters}
    overlay = {"system": entry.overlay.system, "messages": list(entry.overlay.messages)}
    return JSONResponse(
        {
            "modelfile": write_modelfile(entry.stands_for or entry.name, entry.template, parameters, entry.overlay),
            "parameters": write_parameters(parameters),
            "template": entry.template,
            "license": entry.license,
            **{name: value for name, value in overlay.items() if value},
            "details": _write_details(entry),
            "model_info": {  # by the keys of a GGUF file, which clients read
                "general.architecture": entry.family,
                "general.basename": entry.name,
                "general.parameter_count": entry.num_parameters,
                f"{entry.family}.context_length": entry.context_tokens,
                f"{entry.family}.embedding_length": entry.embedding_length,
            },
            "capabilities": list(entry.capabilities),
            "modified_at": write_time(entry.modified),
        }
    )


@router.post("/api/pull")
async def pull(body: PullRequest, request: Request, service: ServiceOf) -> Response:
    """Download a model and stream the progress. A model that is here already is not downloaded again."""
    name = body.wanted
    is_here = await asyncio.to_thread(service.catalog.names.has_name, name)
    if not is_here and not models.can_pull(name):
        raise ModelNotFound(f"pull model manifest: file does not exist: nothing is known of {name!r}")
    if body.stream is not False:
        return StreamingResponse(pull_lines(name, service.catalog, is_here), media_type=NDJSON)
    if not is_here:
        await cancel_on_disconnect(request, _fetch_silently(name, service.catalog))
    return JSONResponse({"status": "success"})


class PullProgress:
    """The progress of a download. The working thread calls it; it puts lines into a queue."""

    def __init__(self, digest: str | None) -> None:
        self.lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None ends them
        self.is_unwanted = False
        self._digest = {"digest": digest} if digest else {}
        self._loop = asyncio.get_running_loop()
        self._line: dict[str, Any] = {}
        self._put_s = 0.0

    def start(self, label: str, total_bytes: int | None) -> None:
        self._require_wanted()
        counted = {} if total_bytes is None else {**self._digest, "total": total_bytes, "completed": 0}
        self._line = {"status": label, **counted}
        self.finish()

    def advance(self, num_bytes: int) -> None:
        self._require_wanted()
        if "total" in self._line:
            self._line["completed"] += num_bytes
        if time.monotonic() - self._put_s >= _LINE_EVERY_S:
            self.finish()

    def finish(self) -> None:
        self._put_s = time.monotonic()
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.lines.put_nowait, dict(self._line))

    def _require_wanted(self) -> None:
        if self.is_unwanted:
            raise DownloadError("the client disconnected")


async def pull_lines(name: str, catalog: Catalog, is_here: bool) -> AsyncIterator[str]:
    """The lines of a download. An error is the last line."""
    yield json_line({"status": "pulling manifest"})
    if not is_here:
        try:
            async with aclosing(_fetch(name, catalog)) as lines:
                async for line in lines:
                    yield json_line(line)
        except Exception as error:
            yield json_line(format_plain_error(to_http_error(error)))
            return
    yield json_line({"status": "success"})


async def _fetch_silently(name: str, catalog: Catalog) -> None:
    async with aclosing(_fetch(name, catalog)) as lines:
        async for _ in lines:
            pass


async def _fetch(name: str, catalog: Catalog) -> AsyncGenerator[dict[str, Any], None]:
    """Download a model in a thread, and give out its progress. Raises what `Catalog.pull` raises."""
    known = KNOWN.get(plain_name(name))
    progress = PullProgress(f"sha256:{known.gguf_sha256}" if known else None)

    def end(work: asyncio.Task[Any]) -> None:
        progress.lines.put_nowait(None)
        _ = work.cancelled() or work.exception()  # asyncio warns of exceptions that are never read

    work = asyncio.create_task(asyncio.to_thread(catalog.pull, name, progress))
    work.add_done_callback(end)
    try:
        while (line := await progress.lines.get()) is not None:
            yield line
        await work
    finally:
        progress.is_unwanted = True


@router.post("/api/copy")
async def copy(body: CopyRequest, service: ServiceOf) -> Response:
    """Give a model another name. It stays one model, with one tree."""
    source = await asyncio.to_thread(service.catalog.find, body.source)
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
        "format": "safetensors",
        "family": entry.family,
        "families": [entry.family],
        "parameter_size": human_number(entry.num_parameters),
        "quantization_level": entry.quantization,
    }
