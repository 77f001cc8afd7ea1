"""The models that can be fetched by a short name, and which of them fit into the memory of the server's machine."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from bough.server.apis.answering import ServiceOf
from bough.server.http.errors import format_plain_error
from bough.server.http.json_routes import route_class
from bough.server.serving.catalog import Catalog
from bough.system.resources import read_host_memory

router = APIRouter(route_class=route_class(format_plain_error), tags=["catalogue"])


@router.get("/api/catalogue")
async def read_catalogue(service: ServiceOf) -> JSONResponse:
    """Every short name with size, licence and whether it fits, and whether the model is here already."""
    return JSONResponse(await asyncio.to_thread(_describe, service.catalog))


def _describe(catalog: Catalog) -> dict[str, Any]:
    memory_bytes = read_host_memory().total_bytes
    found = catalog.list_catalogue(memory_bytes)
    models = [asdict(each) | {"is_here": catalog.names.has_name(each.name)} for each in found]
    return {"memory_bytes": memory_bytes, "models": models}
