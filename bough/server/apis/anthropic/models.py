"""Anthropic's list of models. OpenAI's has the same paths: a client of Anthropic's API is known by its version header."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.routing import Match
from starlette.types import Scope

from bough.errors import RequestError
from bough.server.apis.anthropic.messages import format_error
from bough.server.http.bounds import MAX_NAME_CHARACTERS
from bough.server.http.wire import ServiceOf, route_class
from bough.server.serving.catalog import CatalogEntry

_VERSION_HEADER = b"anthropic-version"
_LARGEST_PAGE = 1_000

Id = Annotated[str | None, Query(max_length=MAX_NAME_CHARACTERS)]


class ModelsRoute(route_class(format_error)):  # type: ignore[misc]
    """A route that only clients of Anthropic's API see."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not any(name == _VERSION_HEADER for name, _ in scope.get("headers", ())):
            return Match.NONE, {}
        found: tuple[Match, Scope] = super().matches(scope)
        return found


router = APIRouter(route_class=ModelsRoute, tags=["Anthropic"], include_in_schema=False)


@router.get("/v1/models")
async def list_models(
    service: ServiceOf,
    limit: Annotated[int, Query(ge=1, le=_LARGEST_PAGE)] = 20,
    after_id: Id = None,
    before_id: Id = None,
) -> dict[str, Any]:
    """Every local model, page by page."""
    return write_page(await asyncio.to_thread(service.catalog.list), limit, after_id, before_id)


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, service: ServiceOf) -> dict[str, Any]:
    """One local model."""
    return write_model(await asyncio.to_thread(service.catalog.find, name))


def write_page(entries: Sequence[CatalogEntry], limit: int, after_id: str | None, before_id: str | None) -> dict[str, Any]:
    """The models after or before one of them. Raises RequestError for an id that is not known."""
    start, end = 0, len(entries)
    if after_id is not None:
        start = _place_of(entries, after_id, "after_id") + 1
    if before_id is not None:
        end = _place_of(entries, before_id, "before_id")
        start = max(start, end - limit) if after_id is None else start
    page = entries[start : min(end, start + limit)]
    is_backward = before_id is not None and after_id is None
    return {
        "data": [write_model(entry) for entry in page],
        "has_more": start > 0 if is_backward else start + limit < end,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _place_of(entries: Sequence[CatalogEntry], wanted: str, field: str) -> int:
    for place, entry in enumerate(entries):
        if entry.name == wanted.removesuffix(":latest"):
            return place
    raise RequestError(f"{field} is {wanted[:80]!r}, and there is no such model")


def write_model(entry: CatalogEntry) -> dict[str, Any]:
    """A model in the format of Anthropic's API."""
    created = entry.modified.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"type": "model", "id": entry.name, "display_name": entry.name, "created_at": created}
