"""Single nodes of the tree over HTTP, by the numbers that `/api/events` tells: read, pin, evict.

If the server has keys, a client reaches only nodes of its own tree.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from bough.cache.admin.nodes import NodeDetails
from bough.cache.tree.state import Tier
from bough.cache.tree.tokens import cut, num_tokens
from bough.server.apis.bough.cache import ModelName, ScopeOf
from bough.server.http.bounds import SHORT_NAME
from bough.server.http.errors import format_plain_error
from bough.server.http.wire import ServiceOf, Wire, route_class
from bough.server.serving.cache import FromNode, NodeName

router = APIRouter(prefix="/api/cache/nodes", route_class=route_class(format_plain_error), tags=["cache"])

MOST_CHARACTERS = 100_000
MOST_TOKENS = MOST_CHARACTERS  # no token has less than one, but for special ones

Number = Annotated[int, Field(ge=1, lt=2**63)]


class NodeBody(Wire):
    """A node of a model's tree. Without a model, the one that was used last is meant; `root` is the name of its tree."""

    model: Annotated[str, SHORT_NAME] | None = None
    root: Annotated[str, SHORT_NAME] = ""
    node: Number


class PinBody(NodeBody):
    """A node, and whether it is to be kept."""

    kept: bool = True


@router.get("")
async def read_node(
    service: ServiceOf,
    scope: ScopeOf,
    node: Annotated[int, Query(ge=1, lt=2**63, description="The number of the node.")],
    root: Annotated[str, Query(max_length=1024, description="The tree, for who sees all.")] = "",
    model: ModelName = None,
) -> JSONResponse:
    """One node with all of its text, and the end of the text that leads to it."""
    found = await service.cache.read_node(NodeName(model, root, node, scope))
    return await asyncio.to_thread(lambda: JSONResponse(_write(found)))


def _write(found: FromNode[NodeDetails]) -> dict[str, Any]:
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
        "in_use": record.is_pinned,
        "hits": record.hits,
        "idle_s": round(details.idle_s, 3),
        "children": details.num_children,
    }


@router.post("/pin")
async def pin_node(body: PinBody, service: ServiceOf, scope: ScopeOf) -> JSONResponse:
    """Keep the path to a node longer than others, or no longer. 400 if it cannot be restored there."""
    found = await service.cache.keep_node(_name(body, scope), body.kept)
    kept = {"kept": found.result.is_kept, "pinned_tokens": found.result.end if found.result.is_kept else 0}
    return JSONResponse({"model": found.model, "root": found.root, "node": body.node, **kept})


@router.post("/evict")
async def evict_node(body: NodeBody, service: ServiceOf, scope: ScopeOf) -> JSONResponse:
    """Drop a node and all below it that no running request uses, in memory and on disk."""
    found = await service.cache.evict_node(_name(body, scope))
    done = found.result
    counts = {"evicted_tokens": done.num_tokens, "evicted_nodes": done.num_nodes, "left_nodes": done.num_left}
    return JSONResponse({"model": found.model, "root": found.root, "node": body.node, **counts})


def _name(body: NodeBody, scope: str | None) -> NodeName:
    return NodeName(body.model, body.root, body.node, scope)
