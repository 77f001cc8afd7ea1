"""Whether the server says truly how it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from bough.config import Settings
from bough.server.apis.bough import health
from bough.server.apis.bough.health import read_health, status_of
from bough.server.app import error_format_of
from bough.server.http.security import SecurityMiddleware
from bough.server.serving.service import Service
from tests.server.layers import send_to
from tests.server.servers import StartServer


def make_service(is_stuck: bool = False, verified: int = 0, different: int = 0) -> Any:
    """A service as far as health looks at it, in states that a real one cannot be put into."""
    return with_figures({"verified": verified, "different": different}, is_stuck, verify_cache=0.5)


def with_figures(figures: dict[str, Any], is_stuck: bool = False, **settings: Any) -> Service:
    """A service over one model whose engine's thread noted these figures."""
    worker = SimpleNamespace(snapshot=lambda: figures, is_stuck=is_stuck)
    models: Any = SimpleNamespace(list=lambda: [SimpleNamespace(name="tiny", worker=worker)])
    return Service(Settings(**settings), models, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "is_stuck", "status"),
    [
        ({"is_starting": False}, False, "ok"),
        ({"is_starting": True}, False, "starting"),
        ({"is_starting": False}, True, "stuck"),
        ({"is_starting": True, "is_draining": True}, True, "shutting down"),
    ],
)
def test_the_status_says_what_keeps_the_server_from_answering(state: dict[str, bool], is_stuck: bool, status: str) -> None:
    assert status_of(SimpleNamespace(**state), make_service(is_stuck)) == status


@pytest.mark.anyio
@pytest.mark.parametrize(("different", "is_alarm"), [(0, False), (2, True)])
async def test_an_answer_that_differed_raises_the_alarm_and_the_server_stays_up(different: int, is_alarm: bool) -> None:
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace()), state=SimpleNamespace(is_known=True))

    answer = await read_health(request, make_service(verified=5, different=different))

    assert answer.status_code == 200
    assert f'"verified":5,"different":{different},"alarm":{str(is_alarm).lower()}'.encode() in answer.body


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("figures", "disk"),
    [
        ({"disk_bytes": 5, "disk_is_failing": False}, "ok"),
        ({"disk_bytes": 5, "disk_is_failing": True}, "failing"),
        ({"disk_bytes": 5, "disk_is_read_only": True, "disk_problem": "it is in use"}, "read-only"),
        ({"disk_problem": "the tree cannot be read"}, "unavailable"),
        ({"disk_bytes": 5, "disk_is_failing": False, "disk_problem": "the disk is full"}, "full"),
        ({}, "off"),
    ],
)
async def test_health_tells_whether_what_is_computed_reaches_the_disk(figures: dict[str, Any], disk: str) -> None:
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace()), state=SimpleNamespace())

    answer = await read_health(request, with_figures(figures))

    assert answer.status_code == 200  # answers go on
    assert f'"disk":"{disk}"'.encode() in answer.body


@pytest.mark.anyio
@pytest.mark.parametrize("is_known", [True, False])
async def test_health_tells_known_clients_why_nothing_is_saved(is_known: bool) -> None:
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace()), state=SimpleNamespace(is_known=is_known))

    answer = await read_health(request, with_figures({"disk_bytes": 5, "disk_problem": "the disk is full"}))

    assert (b"the disk is full" in answer.body) is is_known


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_server_that_is_ready_says_so(tiny_server: StartServer, method: str, path: str) -> None:
    answer = httpx.request(method, tiny_server().url + path)

    assert answer.status_code == 200
    assert (answer.json()["status"] == "ok") if method == "GET" else (answer.content == b"")


def test_health_names_the_model(tiny_server: StartServer) -> None:
    assert httpx.get(f"{tiny_server().url}/health").json()["model"] == "tiny"


@pytest.fixture
def keyed(tmp_path: Path) -> SecurityMiddleware:
    """The health of a server with one loaded model, behind the layer that knows alice's key."""
    file = tmp_path / "keys"
    file.write_text("alices-key alice\n", encoding="utf-8")
    file.chmod(0o600)
    app = FastAPI()
    app.include_router(health.router)
    app.state.service = make_service(verified=5, different=2)
    return SecurityMiddleware(app, Settings(data_folder=tmp_path, cache_folder=tmp_path, keys_file=file), error_format_of)


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "wrong"}, {"Authorization": "Bearer alices-ke"}])
def test_where_there_are_keys_only_who_has_one_hears_more_than_the_status(
    keyed: SecurityMiddleware, path: str, headers: dict[str, str]
) -> None:
    answer = send_to(keyed, path=path, headers=headers)

    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "disk": "off"})


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_who_has_a_key_hears_of_models_and_checks(keyed: SecurityMiddleware, path: str) -> None:
    answer = send_to(keyed, path=path, headers={"Authorization": "Bearer alices-key"}).json()

    assert answer["models"] == ["tiny"] and answer["model"] == Settings().model
    assert (answer["verified"], answer["different"], answer["alarm"]) == (5, 2, True)
