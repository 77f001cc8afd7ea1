"""Health for people, load balancers and process managers, and metrics for Prometheus.

`/health/live` says that the process answers, `/health` and `/health/ready` that it takes requests. If the server has keys,
a client without one gets only the status and the state of the disk in one word.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from bough.server.apis.answering import ServiceOf
from bough.server.serving.service import Service
from bough.system.announcement import PROOF_PATH, Announcement

router = APIRouter()

Challenge = Annotated[str, Query(min_length=16, max_length=128)]


@router.api_route("/health/live", methods=["GET", "HEAD"], include_in_schema=False)
async def read_live() -> JSONResponse:
    return JSONResponse({"status": "ok"})


@router.api_route("/health/ready", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def read_health(request: Request, service: ServiceOf) -> JSONResponse:
    """Whether requests are taken now (200) or not (503). Known clients also see the models and the checks of the cache."""
    status = status_of(request.app.state, service)
    headers = {"Cache-Control": "no-store"} | ({} if status == "ok" else {"Retry-After": "5"})
    body: dict[str, Any] = {"status": status, "disk": service.health.disk_state}
    if getattr(request.state, "is_known", False):
        body |= {"model": service.settings.model, "models": service.health.loaded_names}
        body |= {"disk_problem": service.health.disk_problem} if service.health.disk_problem else {}
        if service.settings.verify_cache:
            checks = service.health.count_checks()
            body |= {"verified": checks.num_verified, "different": checks.num_different, "alarm": checks.num_different > 0}
    return JSONResponse(body, 200 if status == "ok" else 503, headers)


@router.get(PROOF_PATH, include_in_schema=False)
async def prove_announcement(request: Request, challenge: Challenge) -> JSONResponse:
    """Prove to a command on this machine that `server.json` is this server's; 404 if it has not written it."""
    announcement: Announcement | None = getattr(request.app.state, "announcement", None)
    if announcement is None:
        return JSONResponse({"error": "this server is not announced"}, 404)
    return JSONResponse({"proof": announcement.prove(challenge)}, headers={"Cache-Control": "no-store"})


def status_of(state: Any, service: Service) -> str:
    """The state of the server in one or two words."""
    if getattr(state, "is_draining", False):
        return "shutting down"
    if getattr(state, "is_starting", False):
        return "starting"
    if not service.health.has_replicas:
        return "no replica"
    return "stuck" if service.health.is_stuck else "ok"


@router.get("/metrics", response_class=Response)
async def read_metrics(request: Request, service: ServiceOf) -> Response:
    """The metrics, in the format that Prometheus asks for."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(service.metrics.registry), headers={"Content-Type": content_type})
