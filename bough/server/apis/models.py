"""OpenAI's and Anthropic's lists of models. They have the same paths; clients of Anthropic's API send a version header."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.routing import Match
from starlette.types import Scope

from bough.errors import RequestError
from bough.server.apis.answering import ServiceOf
from bough.server.apis.anthropic.messages import format_error as format_anthropic_error
from bough.server.apis.openai.wire import format_error as format_openai_error
from bough.server.http.bounds import MAX_NAME_CHARACTERS
from bough.server.http.json_routes import route_class
from bough.server.serving.catalog import CatalogEntry

_VERSION_HEADER = b"anthropic-version"
_LARGEST_PAGE = 1_000

Id = Annotated[str | None, Query(max_length=MAX_NAME_CHARACTERS)]


class AnthropicRoute(route_class(format_anthropic_error)):  # type: ignore[misc]
    """A route that only clients of Anthropic's API see."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not any(name == _VERSION_HEADER for name, _ in scope.get("headers", ())):
            return Match.NONE, {}
        found: tuple[Match, Scope] = super().matches(scope)
        return found


anthropic_router = APIRouter(route_class=AnthropicRoute, tags=["Anthropic"], include_in_schema=False)
openai_router = APIRouter(route_class=route_class(format_openai_error), tags=["OpenAI"])


@openai_router.get("/v1/models")
async def list_models(service: ServiceOf) -> dict[str, Any]:
    """Every local model."""
    return {"object": "list", "data": [_write_openai(entry) for entry in await asyncio.to_thread(service.catalog.list)]}


@openai_router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, service: ServiceOf) -> dict[str, Any]:
    """One local model."""
    return _write_openai(await asyncio.to_thread(service.catalog.find, name))


def _write_openai(entry: CatalogEntry) -> dict[str, Any]:
    return {"id": entry.name, "object": "model", "created": int(entry.modified.timestamp()), "owned_by": "bough"}


@anthropic_router.get("/v1/models")
async def list_pages(
    service: ServiceOf,
    limit: Annotated[int, Query(ge=1, le=_LARGEST_PAGE)] = 20,
    after_id: Id = None,
    before_id: Id = None,
) -> dict[str, Any]:
    """Every local model, page by page."""
    entries = await asyncio.to_thread(service.catalog.list)
    start, end = 0, len(entries)
    if after_id is not None:
        start = _place_of(entries, after_id, "after_id") + 1
    if before_id is not None:
        end = _place_of(entries, before_id, "before_id")
        start = max(start, end - limit) if after_id is None else start
    page = entries[start : min(end, start + limit)]
    is_backward = before_id is not None and after_id is None
    return {
        "data": [_write_anthropic(entry) for entry in page],
        "has_more": start > 0 if is_backward else start + limit < end,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _place_of(entries: Sequence[CatalogEntry], wanted: str, field: str) -> int:
    for place, entry in enumerate(entries):
        if entry.name == wanted.removesuffix(":latest"):
            return place
    raise RequestError(f"{field} is {wanted[:80]!r}, and there is no such model")


@anthropic_router.get("/v1/models/{name:path}")
async def find_model(name: str, service: ServiceOf) -> dict[str, Any]:
    """One local model."""
    return _write_anthropic(await asyncio.to_thread(service.catalog.find, name))


def _write_anthropic(entry: CatalogEntry) -> dict[str, Any]:
    created = entry.modified.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"type": "model", "id": entry.name, "display_name": entry.name, "created_at": created}
