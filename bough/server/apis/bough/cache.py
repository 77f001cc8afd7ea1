"""The cache over HTTP: view the tree, explain, warm, keep, clear, export and import; single nodes; and `/api/events`.

If the server has keys, each client sees and changes only the tree of its own salt. Without keys all clients see all trees;
a client that sends a salt sees the tree of that salt. Nodes have the numbers that `/api/events` gives them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from pydantic import Field
from starlette.types import Receive, Scope, Send

from bough.cache.admin import nodes
from bough.cache.admin.drawing import LEAST_WIDTH, MIN_TOKENS, MOST_WIDTH
from bough.cache.disk import ReadOnlyTree
from bough.cache.tree.state import Tier
from bough.errors import RequestError, TooLarge, Unavailable
from bough.prompting.ask import Ask
from bough.server.apis.answering import SaltOf, ServiceOf
from bough.server.apis.ollama.wire import Messages, Tools
from bough.server.http.bounds import SHORT_NAME
from bough.server.http.errors import format_plain_error
from bough.server.http.json_routes import Wire, route_class
from bough.server.http.streaming import EVENT_STREAM, ClosingStream, Pieces, cancel_on_disconnect, sse, sse_comment
from bough.server.serving.cache import FromNode, NodeName
from bough.server.serving.events.hub import INTERVAL_S, LEAST_INTERVAL_S, MOST_INTERVAL_S, EventHub
from bough.server.serving.events.reader import EventReader
from bough.server.serving.service import Service
from bough.server.serving.transfers import require_room, temporary_file
from bough.tokens import cut, num_tokens
from bough.types import Message

router = APIRouter(route_class=route_class(format_plain_error), tags=["cache"])

MOST_CHARACTERS = 100_000
MOST_TOKENS = MOST_CHARACTERS  # no token has less than one, but for special ones
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
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages: list[Message] = [*system, {"role": "user", "content": self.prompt}]
        if self.messages is not None:
            messages = [message.to_message() for message in self.messages]
        return Ask(self.model or "", messages=messages, tools=self.tools or (), continues_answer=False, salt=salt)


def get_scope(request: Request, salt: SaltOf) -> str | None:
    """The salt whose tree the client sees; None for all of them."""
    return None if getattr(request.state, "sees_all", False) and not salt else salt


ScopeOf = Annotated[str | None, Depends(get_scope)]
ModelName = Annotated[str | None, Query(description="A model; without one, that which was used last.")]


@router.get("/api/cache")
async def read_figures(request: Request, service: ServiceOf, scope: ScopeOf, model: ModelName = None) -> JSONResponse:
    """The figures of each loaded model's tree, and its limits."""
    found = await cancel_on_disconnect(request, service.cache.stats(model, scope))
    budgets = {name: getattr(service.settings, name) for name in _BUDGETS}
    return JSONResponse({"models": [{"model": each.model, **each.result} for each in found], "settings": budgets})


@router.get("/api/cache/tree")
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
    depth: Annotated[int | None, Query(ge=1, description="The most levels of a drawing.")] = None,
    min_tokens: Annotated[int, Query(ge=0, description="A drawing joins edges of fewer tokens.")] = MIN_TOKENS,
) -> Response:
    """The tree of one model: every edge with its text, its tiers, what is kept and what is in use."""
    found = await cancel_on_disconnect(request, service.cache.tree(model, salt if scope is None else scope))
    if format == "text":
        return PlainTextResponse(await asyncio.to_thread(found.result.draw, width, depth, min_tokens))
    roots = await asyncio.to_thread(found.result.to_json, has_ids=ids)
    return Response(f'{{"model":{json.dumps(found.model)},"roots":{roots}}}', media_type="application/json")


@router.get("/api/cache/explain")
async def explain_text(
    service: ServiceOf,
    salt: SaltOf,
    prompt: Annotated[str, Query(min_length=1)],
    model: ModelName = None,
    raw: bool = False,
) -> JSONResponse:
    """How much of a text would be reused, and why not more."""
    return await explain(PrefixBody(model=model, prompt=prompt, raw=raw), service, salt)


@router.post("/api/cache/explain")
async def explain(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """How much of a prompt would be reused, and why not more."""
    found = await service.cache.explain(body.to_ask(salt))
    written: dict[str, Any] = {"model": found.model, **asdict(found.result)}
    if found.replica:
        known = {name: {"matched_tokens": each.matched, "cached_tokens": each.cached} for name, each in found.known.items()}
        written |= {"replica": found.replica, "replicas": known}
    return JSONResponse(written)


@router.post("/api/cache/warm")
async def warm(body: PrefixBody, request: Request, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """Compute a prefix and keep it, so that the first request that begins with it is quick."""
    found = await cancel_on_disconnect(request, service.cache.warm(body.to_ask(salt)))
    usage = asdict(found.result.usage)
    counts = {name: usage[name] for name in ("prompt_tokens", "matched_tokens", "cached_tokens", "computed_tokens")}
    return JSONResponse({"model": found.model, **counts, "timings": asdict(found.result.timings)})


@router.post("/api/cache/keep")
@router.post("/api/cache/pin", include_in_schema=False)  # the earlier name
async def keep(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> Response:
    """Keep a known prefix longer than prefixes that are not kept; 409 if not all of it is known."""
    return await _set_kept(body, service, salt, kept=True)


@router.post("/api/cache/unkeep")
@router.post("/api/cache/unpin", include_in_schema=False)  # the earlier name
async def unkeep(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> Response:
    """Keep a prefix no longer than any other; 409 if not all of it is known."""
    return await _set_kept(body, service, salt, kept=False)


async def _set_kept(body: PrefixBody, service: Service, salt: str, *, kept: bool) -> Response:
    changed = await service.cache.keep(body.to_ask(salt), kept)
    found = changed.result
    known = f"{found.matched_tokens} of the {found.prompt_tokens} tokens are known"
    if found.matched_tokens < found.prompt_tokens:
        raise HTTPException(409, f"{known}: warm the prefix first")
    if changed.is_kept is not kept:
        raise HTTPException(409, f"{known}, and there is no restore point at their end: warm the prefix first")
    return JSONResponse({"model": changed.model, "kept": kept, **asdict(found)})


@router.delete("/api/cache")
async def clear(service: ServiceOf, scope: ScopeOf, model: ModelName = None) -> Response:
    """Delete the trees that the client sees, of one model or of every loaded one, on disk too; 409 if that is only read."""
    try:
        return JSONResponse({"cleared": await service.cache.clear(model, scope)})
    except ReadOnlyTree as error:
        raise HTTPException(409, str(error)) from None


@router.post("/api/cache/export", response_class=Response)
async def export(service: ServiceOf, salt: SaltOf, model: ModelName = None) -> Response:
    """The tree of the client's salt on disk, as one archive for `import`."""
    found = await service.cache.export(model, salt)
    return _SentOnce(found.result, media_type="application/x-tar", filename=f"{Path(found.model).name}.bough.tar")


class _SentOnce(FileResponse):
    """A file that is deleted when it was sent, or when the client has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            Path(self.path).unlink(missing_ok=True)


@router.post("/api/cache/import")
async def import_archive(request: Request, service: ServiceOf, salt: SaltOf, model: ModelName = None) -> Response:
    """Add the archive in the body to the tree of the client's salt. Requests go on meanwhile."""
    settings = service.settings
    room_bytes = await asyncio.to_thread(require_room, settings, int(request.headers.get("content-length", 0)))
    try:
        with temporary_file(settings) as file:
            await _write_file(file, request.stream(), room_bytes)
            found = await service.cache.import_archive(model, file, salt)
    except TooLarge as error:
        raise HTTPException(413, str(error), {"Connection": "close"}) from None
    except OSError as error:
        raise Unavailable(f"the archive could not be imported: {error.strerror or error}") from error
    return JSONResponse({"model": found.model, **asdict(found.result)})


async def _write_file(file: Path, pieces: AsyncIterator[bytes], limit: int) -> None:
    """Write a body to a file as it arrives. Raises TooLarge."""
    size = 0
    with file.open("wb") as output:
        async for piece in pieces:
            size += len(piece)
            if size > limit:
                raise TooLarge(size, limit)
            await asyncio.to_thread(output.write, piece)


class NodeBody(Wire):
    """A node of a model's tree. Without a model, the one that was used last is meant; `root` is the name of its tree."""

    model: Annotated[str, SHORT_NAME] | None = None
    root: Annotated[str, SHORT_NAME] = ""
    node: Annotated[int, Field(ge=1, lt=2**63)]

    def to_name(self, scope: str | None) -> NodeName:
        return NodeName(self.model, self.root, self.node, scope)


class KeepNodeBody(NodeBody):
    """A node, and whether it is to be kept."""

    kept: bool = True


@router.get("/api/cache/nodes")
async def read_node(
    service: ServiceOf,
    scope: ScopeOf,
    node: Annotated[int, Query(ge=1, lt=2**63, description="The number of the node.")],
    root: Annotated[str, Query(max_length=1024, description="The tree, for who sees all.")] = "",
    model: ModelName = None,
) -> JSONResponse:
    """One node with all of its text, and the end of the text that leads to it."""
    found = await service.cache.at_node(NodeName(model, root, node, scope), nodes.read_node)
    return await asyncio.to_thread(lambda: JSONResponse(_write_node(found)))


def _write_node(found: FromNode[nodes.NodeDetails]) -> dict[str, Any]:
    details, record = found.result, found.result.record
    path_start = max(0, num_tokens(details.path) - MOST_TOKENS)
    return {
        "model": found.model,
        "root": found.root,
        "node": record.key,
        "start": record.start,
        "end": record.end,
        "text": found.decode(cut(record.edge, 0, MOST_TOKENS))[:MOST_CHARACTERS],
        "path_text": found.decode(cut(details.path, path_start))[-MOST_CHARACTERS:],
        "bytes": record.nbytes,
        "tiers": {tier.name.lower(): record.tiers[tier] for tier in Tier if record.tiers[tier]},
        "points": record.points,
        "kept": record.kept,
        "in_use": record.is_in_use,
        "hits": record.hits,
        "idle_s": round(details.idle_s, 3),
        "children": details.num_children,
    }


@router.post("/api/cache/nodes/keep")
@router.post("/api/cache/nodes/pin", include_in_schema=False)  # the earlier name
async def keep_node(body: KeepNodeBody, service: ServiceOf, scope: ScopeOf) -> JSONResponse:
    """Keep the path to a node longer than others, or no longer. 400 if it cannot be restored there."""
    found = await service.cache.at_node(body.to_name(scope), partial(nodes.keep_node, kept=body.kept))
    num_kept = found.result.end if found.result.is_kept else 0
    kept = {"kept": found.result.is_kept, "kept_tokens": num_kept, "pinned_tokens": num_kept}  # the last: an earlier name
    return JSONResponse({"model": found.model, "root": found.root, "node": body.node, **kept})


@router.post("/api/cache/nodes/evict")
async def evict_node(body: NodeBody, service: ServiceOf, scope: ScopeOf) -> JSONResponse:
    """Drop a node and all below it that no running request uses, in memory and on disk."""
    found = await service.cache.at_node(body.to_name(scope), nodes.evict_node)
    evicted = found.result
    counts = {"evicted_tokens": evicted.num_tokens, "evicted_nodes": evicted.num_nodes, "left_nodes": evicted.num_left}
    return JSONResponse({"model": found.model, "root": found.root, "node": body.node, **counts})


@router.get("/api/events")
async def read_events(
    service: ServiceOf,
    scope: ScopeOf,
    model: Annotated[str | None, Query(max_length=1024, description="Only this model.")] = None,
    interval: Annotated[
        float, Query(ge=LEAST_INTERVAL_S, le=MOST_INTERVAL_S, description="Seconds between two looks.")
    ] = INTERVAL_S,
) -> Response:
    """Events as long as the client reads: `hello`, `models`, `tree`, `request`, `figures`. A model may be loaded later."""
    name = None if model is None else await service.find_name(model)
    reader = service.events.open(scope, name, interval)
    return ClosingStream(_write_events(service.events, reader), EVENT_STREAM, partial(service.events.leave, reader))


async def _write_events(hub: EventHub, reader: EventReader) -> Pieces:
    async for frames in hub.frames(reader):
        yield "".join(sse(text, event) for event, text in frames) or sse_comment("")
