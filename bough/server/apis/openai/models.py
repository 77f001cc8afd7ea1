"""OpenAI's list of models."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from bough.server.apis.openai.wire import format_error
from bough.server.http.wire import ServiceOf, route_class
from bough.server.serving.catalog import CatalogEntry

router = APIRouter(route_class=route_class(format_error), tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(service: ServiceOf) -> dict[str, Any]:
    """Every local model."""
    return {"object": "list", "data": [write_model(entry) for entry in await asyncio.to_thread(service.catalog.list)]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, service: ServiceOf) -> dict[str, Any]:
    """One local model."""
    return write_model(await asyncio.to_thread(service.catalog.find, name))


def write_model(entry: CatalogEntry) -> dict[str, Any]:
    """A model in the format of OpenAI's API."""
    return {"id": entry.name, "object": "model", "created": int(entry.modified.timestamp()), "owned_by": "bough"}
