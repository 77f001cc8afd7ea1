"""Health for people, load balancers and process managers, and metrics for Prometheus.

`/health/live` says that the process answers, `/health` and `/health/ready` that it takes requests. If the server has keys,
a client without one gets only the status and the state of the disk in one word.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from bough.server.http.wire import ServiceOf
from bough.server.serving.service import Service
from bough.system.announcement import PROOF_PATH, Announcement

router = APIRouter()


@router.api_route("/health/live", methods=["GET", "HEAD"], include_in_schema=False)
async def read_live() -> JSONResponse:
    """The process answers."""
    return JSONResponse({"status": "ok"})


@router.api_route("/health/ready", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def read_health(request: Request, service: ServiceOf) -> JSONResponse:
    """Whether requests are taken now (200) or not (503). Known clients also see the models and the checks of the cache."""
    status = status_of(request.app.state, service)
    details = _describe_models(service) if getattr(request.state, "is_known", False) else {}
    headers = {"Cache-Control": "no-store"} | ({} if status == "ok" else {"Retry-After": "5"})
    body = {"status": status, "disk": service.disk_state} | details
    return JSONResponse(body, 200 if status == "ok" else 503, headers)


@router.get(PROOF_PATH, include_in_schema=False)
async def prove_announcement(
    request: Request, challenge: Annotated[str, Query(min_length=16, max_length=128)]
) -> JSONResponse:
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
    if not service.has_replicas:
        return "no replica"
    return "stuck" if service.is_stuck else "ok"


def _describe_models(service: Service) -> dict[str, Any]:
    about: dict[str, Any] = {"model": service.settings.model, "models": service.loaded_names}
    if service.disk_problem:
        about["disk_problem"] = service.disk_problem
    if not service.settings.verify_cache:
        return about
    checks = service.count_checks()
    found = {"verified": checks.num_verified, "different": checks.num_different}
    return about | found | {"alarm": checks.num_different > 0}


@router.get("/metrics", response_class=Response)
async def read_metrics(request: Request, service: ServiceOf) -> Response:
    """The metrics, in the format that Prometheus asks for."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(service.metrics.registry), headers={"Content-Type": content_type})
