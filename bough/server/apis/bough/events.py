"""`/api/events`: trees, requests and figures as they change, as server-sent events.

If the server has keys, a client sees only its own tree and its own requests. Without readers nothing is collected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from bough.server.apis.bough.cache import ScopeOf
from bough.server.http.errors import format_plain_error
from bough.server.http.streaming import EVENT_STREAM, sse, sse_comment
from bough.server.http.wire import ServiceOf, route_class
from bough.server.serving.events.hub import INTERVAL_S, LEAST_INTERVAL_S, MOST_INTERVAL_S, EventHub
from bough.server.serving.events.reader import Reader

router = APIRouter(route_class=route_class(format_plain_error), tags=["cache"])


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
    return EventStream(service.events, service.events.open(scope, name, interval))


class EventStream(StreamingResponse):
    """A response that tells events until the client or the server goes."""

    def __init__(self, hub: EventHub, reader: Reader) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_write(hub, reader), media_type=EVENT_STREAM, headers=headers)
        self._hub = hub
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.leave(self._reader)


async def _write(hub: EventHub, reader: Reader) -> AsyncIterator[str]:
    async for frame in hub.frames(reader):
        yield sse_comment("") if frame is None else sse(frame[1], frame[0])
