"""`bough serve` as a process of its own, and the commands that ask it: ps, stop, tree and explain."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from bough.cli.client import find_url, local_url
from bough.cli.server import announce, describe_exposure
from bough.config import Settings
from bough.system.announcement import make_announcement
from tests.models.web_server import Site, serving
from tests.server.servers import Server, find_port, make_chat_folder, running, wait_for_log


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("serve")
    with running(str(folder), home, engine="torch", data_folder=home / "data", keep_alive="never") as server:
        yield server


@pytest.fixture
def answered(served: Server) -> Server:
    """The server, with its model loaded and one answer in its tree."""
    messages = [{"role": "user", "content": "hello there"}]
    body = {"model": "tiny", "messages": messages, "stream": False, "options": {"num_predict": 2}}
    assert httpx.post(f"{served.url}/api/chat", json=body, timeout=60).status_code == 200
    return served


def test_one_line_says_what_is_served_and_where(served):
    (line,) = [line for line in served.log.splitlines() if "serves" in line]

    assert line.startswith("bough ") and f"serves tiny at {served.url} (Ollama, OpenAI, Anthropic)" in line
    assert "warning" not in served.log


def test_the_log_is_in_a_file_too_without_a_word_of_what_was_said(invoke, answered, monkeypatch):
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(answered.cache_folder))

    shown = invoke("logs").stdout

    assert "POST /api/chat 200" in shown and "the model tiny was loaded" in shown
    assert "hello there" not in shown


def test_the_log_says_which_engine_the_model_runs_on(served):
    line = next(line for line in served.log.splitlines() if "was loaded" in line)  # it may have been loaded again since

    assert " the model tiny was loaded in " in line and " s: torch, cpu, float32; weights: float32 (" in line


def test_an_engine_that_is_not_known_is_refused_before_anything_is_loaded(invoke, folder):
    result = invoke("serve", "--model", str(folder), "--engine", "abacus")

    assert (result.exit_code, result.stderr) == (1, "error: --engine is 'abacus', and must be auto, torch or mlx\n")


def test_a_second_server_at_the_same_port_says_that_it_is_in_use(invoke, served, folder):
    port = served.url.rpartition(":")[2]

    result = invoke("serve", "--model", str(folder), "--port", port)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: port {port} at 127.0.0.1 is in use")


def test_ps_shows_what_is_loaded(invoke, answered):
    header, row = invoke("ps", "--url", answered.url).stdout.splitlines()

    assert header.split() == ["NAME", "SIZE", "ENGINE", "DEVICE", "CONTEXT", "LANES", "TREE", "UNTIL"]
    assert row.startswith("tiny") and row.endswith("for ever")
    assert all(word in row for word in ("torch", "CPU", "2,048", "busy"))


def test_ps_as_json_has_exact_numbers(invoke, answered):
    (found,) = json.loads(invoke("ps", "--url", answered.url, "--json").stdout)

    assert (found["name"], found["context_tokens"], found["until"]) == ("tiny:latest", 2048, None)
    assert (found["engine"], found["device"]) == ("torch", "CPU")
    assert found["weights"].startswith("float32 (") and found["step"]
    assert found["tree_tokens"] > 0 and found["tree_bytes"] > 0 and found["lanes"] > 0


def test_tree_draws_what_is_remembered(invoke, answered):
    result = invoke("tree", "tiny", "--url", answered.url, env={"COLUMNS": "200"})

    assert result.exit_code == 0
    assert result.stdout.startswith("root") and "<|im_start|>system" in result.stdout


def test_tree_draws_as_many_levels_as_were_asked_for(invoke, answered):
    body = {"model": "tiny", "prompt": "Bye", "stream": False, "options": {"num_predict": 2}}
    assert httpx.post(f"{answered.url}/api/generate", json=body, timeout=60).status_code == 200

    lines = invoke("tree", "tiny", "--url", answered.url, "--depth", "1").stdout.splitlines()
    joined = invoke("tree", "tiny", "--url", answered.url, "--min-tokens", "9999").stdout

    assert lines[-1] == "   └─ … 2 branches"
    assert joined == "root\n└─ … 2 ends of fewer than 9,999 tokens\n"
    assert invoke("tree", "--depth", "0").exit_code == 2


def test_tree_as_json_is_plain_data(invoke, answered):
    found = json.loads(invoke("tree", "--url", answered.url, "--json").stdout)

    assert found["model"] == "tiny"
    assert "hello there" in json.dumps(found["roots"])


def test_explain_tells_where_a_prompt_leaves_the_tree(invoke, answered):
    result = invoke("explain", "--url", answered.url, "hello there, you")

    assert result.exit_code == 0
    assert "the prompt leaves the tree" in result.stdout and "the tree continues (1)" in result.stdout


def test_explain_as_json_counts_tokens(invoke, answered):
    result = invoke("explain", "tiny", "hello there", "--url", answered.url, "--json")

    found = json.loads(result.stdout)
    assert found["prompt_tokens"] - 1 == found["cached_tokens"] > 0


def test_explain_needs_a_prompt(invoke):
    assert invoke("explain").exit_code == 2


def test_stop_unloads_and_the_server_stays(invoke, answered):
    assert invoke("stop", "--url", answered.url).stdout == "stopped tiny:latest\n"

    assert json.loads(invoke("ps", "--url", answered.url, "--json").stdout) == []
    assert "no model is loaded" in invoke("ps", "--url", answered.url).stderr
    assert json.loads(invoke("stop", "--json", "--url", answered.url).stdout) == {"stopped": []}
    assert httpx.get(f"{answered.url}/health", timeout=10).status_code == 200


def test_the_log_tells_how_the_model_is_loaded(served):
    assert " loading: reading weights\n" in served.log


def test_a_request_is_a_short_line_in_the_log(answered):
    wait_for_log(answered, "POST /api/chat")

    line = next(line for line in answered.log.splitlines() if "POST /api/chat" in line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d POST /api/chat 200 [\d.]+m?s \d+\+2 tokens, \d+ cached", line)


def test_ps_and_stop_find_the_server_that_runs_here(invoke, answered, monkeypatch):
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(answered.cache_folder))
    monkeypatch.setenv("BOUGH_PORT", str(find_port()))

    assert [each["name"] for each in json.loads(invoke("ps", "--json").stdout)] == ["tiny:latest"]
    assert invoke("stop").stdout == "stopped tiny:latest\n"


@pytest.mark.parametrize("content", [None, b"", b"# none\n", bytes(range(256)), b"a-key\na-key alice\n"])
def test_a_bad_file_of_keys_is_one_line_before_the_model_is_loaded(invoke, folder, home, content):
    file = home / "keys"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)

    result = invoke("serve", "--model", str(folder), "--port", "0", "--keys-file", str(file))

    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ") and str(file) in result.stderr


def test_packages_that_are_missing_are_one_line_with_the_command_that_installs_them(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi_offline", None)

    result = invoke("serve")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: fastapi_offline not installed: pip install 'bough-llm[server]'\n"


def test_an_unknown_model_is_named(invoke, served):
    result = invoke("stop", "nobody", "--url", served.url)

    assert (result.exit_code, result.stderr) == (1, "error: model 'nobody' not found; there are: tiny\n")


@pytest.mark.parametrize("words", [["ps"], ["stop"]])
def test_without_a_server_every_command_says_how_to_start_one(invoke, monkeypatch, words):
    port = find_port()
    monkeypatch.setenv("BOUGH_PORT", str(port))

    result = invoke(*words)

    assert result.exit_code == 1
    assert result.stderr == f"error: no server at http://127.0.0.1:{port}; `bough serve` starts one\n"


def test_another_server_at_that_address_is_told_apart(invoke):
    with serving(Site(files={"/api/ps": b"<html>"})) as site:
        strange = invoke("stop", "--url", site.url)
        silent = invoke("ps", "--url", site.url)

    assert strange.stderr.startswith(f"error: the program at {site.url} is not a Bough server")
    assert silent.stderr == f"error: {site.url}/api/cache answered with status 404\n"


@pytest.mark.parametrize(
    ("host", "url", "found"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:11435"),
        ("0.0.0.0", None, "http://127.0.0.1:11435"),
        ("::", None, "http://[::1]:11435"),
        ("127.0.0.1", "box:80/", "http://box:80"),
        ("127.0.0.1", "https://box", "https://box"),
    ],
)
def test_the_server_is_found_by_its_address(host, url, found):
    assert find_url(Settings(host=host), url) == found


def test_a_server_starts_without_its_announcement_where_the_cache_folder_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")

    with ExitStack() as held:
        problem = announce(held, tmp_path / "file", make_announcement("http://127.0.0.1:1"))

    assert problem.startswith(f"the cache folder {tmp_path / 'file'} cannot be written: ") and "--url" in problem


def test_the_warning_of_an_open_server_tells_what_containers_need():
    assert "--keys-file" in describe_exposure("http://0.0.0.0:1", "")
    assert "--allowed-hosts host.docker.internal" in describe_exposure("http://0.0.0.0:1", "")
    assert "--allowed-hosts" not in describe_exposure("http://0.0.0.0:1", "box.lan")


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("http://0.0.0.0:11435", "http://127.0.0.1:11435"),
        ("http://[::]:8080", "http://[::1]:8080"),
        ("http://10.0.0.0:1", "http://10.0.0.0:1"),
    ],
)
def test_a_server_for_all_addresses_is_announced_at_the_local_one(url, reached):
    assert local_url(url) == reached
