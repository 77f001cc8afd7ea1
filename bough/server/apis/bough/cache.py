"""The cache over HTTP: view the tree, explain, warm, pin, clear, export and import.

If the server has keys, each client sees and changes only the tree of its own salt. Without keys all clients see all trees;
a client that sends a salt sees the tree of that salt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from pydantic import Field
from starlette.types import Receive, Scope, Send

from bough.cache.admin.drawing import LEAST_WIDTH, MOST_WIDTH
from bough.cache.admin.view import TreeView
from bough.cache.disk import ReadOnlyTree
from bough.errors import RequestError, TooLarge, Unavailable
from bough.server.http.bounds import SHORT_NAME
from bough.server.http.errors import HttpError, error_response, format_plain_error
from bough.server.http.messages import Messages, Tools
from bough.server.http.streaming import cancel_on_disconnect
from bough.server.http.wire import SaltOf, ServiceOf, Wire, route_class
from bough.server.serving.ask import Ask
from bough.server.serving.cache import Explained, FromModel
from bough.server.serving.service import Service
from bough.server.serving.transfers import require_room, temporary_file
from bough.types import Message

router = APIRouter(prefix="/api/cache", route_class=route_class(format_plain_error), tags=["cache"])

_BUDGETS = (
    "cache",
    "lanes",
    "device_memory",
    "host_memory",
    "disk",
    "disk_free",
    "disk_ttl",
    "store_budget",
    "store_ttl",
    "salt_share",
)


class PrefixBody(Wire):
    """A prefix: messages, or a text. The text is a user's message unless `raw`."""

    model: Annotated[str, SHORT_NAME] | None = None
    messages: Messages | None = Field(default=None, min_length=1)
    prompt: str | None = Field(default=None, min_length=1)
    system: str | None = None
    tools: Tools | None = None
    raw: bool = False

    def to_ask(self, salt: str) -> Ask:
        """The prefix as a chat would ask for it. Raises RequestError unless there are messages or a text, and not both."""
        if (self.messages is None) == (self.prompt is None):
            raise RequestError("give either messages or prompt")
        if self.system is not None and (self.raw or self.messages is not None):
            raise RequestError("system goes with a prompt that is not raw; among messages, write it as the first of them")
        if self.raw and (self.tools or self.messages is not None):
            raise RequestError("raw goes with a prompt and without tools: nothing is rendered")
        if self.raw:
            return Ask(self.model or "", text=self.prompt, salt=salt)
        return Ask(self.model or "", messages=self._read_messages(), tools=self.tools or (), salt=salt)

    def _read_messages(self) -> list[Message]:
        if self.messages is not None:
            return [message.to_message() for message in self.messages]
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


def get_scope(request: Request, salt: SaltOf) -> str | None:
    """The salt whose tree the client sees; None: all."""
    return None if getattr(request.state, "sees_all", False) and not salt else salt


ScopeOf = Annotated[str | None, Depends(get_scope)]
ModelName = Annotated[str | None, Query(description="A model; without one, that which was used last.")]


@router.get("")
async def read_figures(request: Request, service: ServiceOf, scope: ScopeOf, model: ModelName = None) -> JSONResponse:
    """The figures of each loaded model's tree, and its limits."""
    found = await cancel_on_disconnect(request, service.cache.stats(model, scope))
    budgets = {name: getattr(service.settings, name) for name in _BUDGETS}
    return JSONResponse({"models": [{"model": each.model, **each.result} for each in found], "settings": budgets})


@router.get("/tree")
async def read_tree(
    request: Request,
    service: ServiceOf,
    scope: ScopeOf,
    model: ModelName = None,
    salt: Annotated[str | None, Query(description="Only the tree of this salt, for who sees all.")] = None,
    format: Annotated[Literal["json", "text"], Query(description="Plain data, or a drawing.")] = "json",
    ids: Annotated[bool, Query(description="The token ids of each edge, too.")] = False,
    width: Annotated[
        int | None, Query(ge=LEAST_WIDTH, le=MOST_WIDTH, description="The most columns of a drawing's lines.")
    ] = None,
) -> Response:
    """The tree of one model: every edge with its text, its tiers, what is pinned and what is in use."""
    found = await cancel_on_disconnect(request, service.cache.tree(model, salt if scope is None else scope))
    if format == "text":
        return PlainTextResponse(await asyncio.to_thread(found.result.draw, width))
    return await asyncio.to_thread(_tree_as_json, found, ids)


def _tree_as_json(found: FromModel[TreeView], has_ids: bool) -> Response:
    roots = found.result.to_json(has_ids=has_ids)
    return Response(f'{{"model":{json.dumps(found.model)},"roots":{roots}}}', media_type="application/json")


@router.get("/explain")
async def explain_text(
    service: ServiceOf,
    salt: SaltOf,
    prompt: Annotated[str, Query(min_length=1)],
    model: ModelName = None,
    raw: bool = False,
) -> JSONResponse:
    """How much of a text would be reused, and why not more."""
    return await explain(PrefixBody(model=model, prompt=prompt, raw=raw), service, salt)


@router.post("/explain")
async def explain(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """How much of a prompt would be reused, and why not more."""
    found = await service.cache.explain(body.to_ask(salt))
    return JSONResponse({"model": found.model, **asdict(found.result)} | _name_replicas(found))


def _name_replicas(found: Explained) -> dict[str, Any]:
    """Of replicas: the one that is explained, and what each of them has."""
    if not found.replica:
        return {}
    known = {name: {"matched_tokens": each.matched, "cached_tokens": each.cached} for name, each in found.known.items()}
    return {"replica": found.replica, "replicas": known}


@router.post("/warm")
async def warm(body: PrefixBody, request: Request, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """Compute a prefix and keep it, so that the first request that begins with it is quick."""
    found = await cancel_on_disconnect(request, service.cache.warm(body.to_ask(salt)))
    usage = found.result.usage
    counts = {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "computed_tokens")}
    return JSONResponse({"model": found.model, **counts})


@router.post("/pin")
async def pin(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> Response:
    """Keep a known prefix longer than prefixes that were not pinned; 409 if not all of it is known."""
    return await _pin(body, service, salt, kept=True)


@router.post("/unpin")
async def unpin(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> Response:
    """Keep a prefix no longer than any other; 409 if not all of it is known."""
    return await _pin(body, service, salt, kept=False)


async def _pin(body: PrefixBody, service: Service, salt: str, *, kept: bool) -> Response:
    pinned = await service.cache.pin(body.to_ask(salt), kept)
    found = pinned.result.explanation
    known = f"{found.matched_tokens} of the {found.prompt_tokens} tokens are known"
    if found.matched_tokens < found.prompt_tokens:
        return error_response(HttpError(409, f"{known}: warm the prefix first"), format_plain_error)
    if pinned.result.is_kept is not kept:
        text = f"{known}, and there is no restore point at their end: warm the prefix first"
        return error_response(HttpError(409, text), format_plain_error)
    return JSONResponse({"model": pinned.model, "kept": kept, **asdict(found)})


@router.delete("")
async def clear(service: ServiceOf, scope: ScopeOf, model: ModelName = None) -> Response:
    """Delete the trees that the client sees, of one model or of every loaded one, on disk too; 409 if that is only read."""
    try:
        return JSONResponse({"cleared": await service.cache.clear(model, scope)})
    except ReadOnlyTree as error:
        return error_response(HttpError(409, str(error)), format_plain_error)


@router.post("/export", response_class=Response)
async def export(service: ServiceOf, salt: SaltOf, model: ModelName = None) -> Response:
    """The tree of the client's salt on disk, as one archive for `import`."""
    found = await service.cache.export(model, salt)
    return _SentOnce(found.result, media_type="application/x-tar", filename=f"{Path(found.model).name}.bough.tar")


class _SentOnce(FileResponse):
    """A file that is deleted when it was sent, or when the client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            Path(self.path).unlink(missing_ok=True)


@router.post("/import")
async def import_archive(request: Request, service: ServiceOf, salt: SaltOf, model: ModelName = None) -> Response:
    """Add the archive in the body to the tree of the client's salt. Requests go on meanwhile."""
    settings = service.settings
    room_bytes = await asyncio.to_thread(require_room, settings, int(request.headers.get("content-length", 0)))
    try:
        with temporary_file(settings) as file:
            await _spool(request.stream(), file, room_bytes)
            found = await service.cache.import_archive(model, file, salt)
    except TooLarge as error:
        return error_response(HttpError(413, str(error), headers={"Connection": "close"}), format_plain_error)
    except OSError as error:
        raise Unavailable(f"the archive could not be imported: {error.strerror or error}") from error
    return JSONResponse({"model": found.model, **asdict(found.result)})


async def _spool(pieces: AsyncIterator[bytes], file: Path, limit: int) -> None:
    """Write a body to a file as it comes. Raises TooLarge."""
    size = 0
    with file.open("wb") as output:
        async for piece in pieces:
            size += len(piece)
            if size > limit:
                raise TooLarge(size, limit)
            await asyncio.to_thread(output.write, piece)
