"""`bough run` and its chat with a model in a running server, which asks for a key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.cli.backends.remote import RemoteBackend, pull
from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.loop import run_chat
from bough.cli.chat.sessions import ChatSession
from bough.cli.client import Client, find_client
from bough.cli.terminal.screen import Screen
from bough.config import Settings
from bough.errors import AccessDenied, BoughError, ModelNotFound, RequestError, Unavailable
from bough.models import ModelFiles
from bough.types import Completion, SilentProgress
from tests.server.in_process import make_words_folder, serving
from tests.server.servers import Address

KEYS = ("first-key-of-this-test", "second-key-of-this-test")
HELLO = [{"role": "user", "content": "Hello there"}]
QUIET: dict[str, Any] = {"is_cancelled": lambda: False, "on_progress": lambda done, total: None}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    home = tmp_path_factory.mktemp("serve")
    files = ModelFiles("tiny", make_words_folder(home / "tiny", do_sample=False))
    (home / "keys").write_text("\n".join(KEYS))
    with serving(files, home, keys_file=home / "keys") as server:
        yield server


@pytest.fixture
def with_server(home: Path, served: Address, monkeypatch: pytest.MonkeyPatch) -> Address:
    """The commands of this test find the server by its announcement, and have its first key."""
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(served.cache_folder))
    monkeypatch.setenv("BOUGH_API_KEY", KEYS[0])
    return served


@pytest.fixture
def backend(served: Address) -> Iterator[RemoteBackend]:
    with Client(served.url, KEYS[0]) as client:
        yield RemoteBackend.open(client, None, SilentProgress())


def ask_ollama(served: Address, key: str, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": HELLO, "stream": False, "options": {"temperature": 0, **options}}
    headers = {"Authorization": f"Bearer {key}"}
    found: dict[str, Any] = httpx.post(f"{served.url}/api/chat", json=body, headers=headers, timeout=60).json()
    return found


def complete(backend: RemoteBackend, prompt: Any = HELLO, choice: int = 0, **given: Any) -> Completion:
    *_, last = backend.stream(prompt, given, choice=choice, **QUIET)
    assert isinstance(last, Completion)
    return last


def test_the_answer_and_the_tree_are_those_of_the_servers_other_clients(invoke, with_server):
    theirs = ask_ollama(with_server, KEYS[0], num_predict=6, repeat_penalty=1.0)

    found = json.loads(invoke("run", "Hello there", "--max-tokens", "6", "--temperature", "0", "--json").stdout)

    assert found["text"] == theirs["message"]["content"]
    assert found["model"] == "tiny"
    assert found["usage"]["cached_tokens"] == found["usage"]["prompt_tokens"] - 1
    assert ask_ollama(with_server, KEYS[1], num_predict=1)["prompt_eval_cached_count"] == 0  # another key has another salt


def test_verbose_tells_which_server_and_the_cost(invoke, with_server):
    first, *facts = invoke("run", "Hello there", "-v", "--max-tokens", "3").stderr.splitlines()

    assert first == f"using the server at {with_server.url}; --local runs the model here"
    assert [line.split("  ")[0] for line in facts][-2:] == ["generated", "finished"]


def test_a_quiet_run_writes_the_answer_alone(invoke, with_server):
    result = invoke("run", "tiny", "Hello there", "--max-tokens", "3")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout


def test_without_a_key_the_error_names_the_setting(invoke, with_server, monkeypatch):
    monkeypatch.delenv("BOUGH_API_KEY")

    result = invoke("run", "Hello there")

    assert result.exit_code == 1
    assert "this server needs a key" in result.stderr and "BOUGH_API_KEY" in result.stderr


def test_a_flag_of_a_local_run_is_followed_here(invoke, loads, with_server):
    result = invoke("run", "Hello there", "--threads", "1", "--max-tokens", "3")

    assert result.stderr == f"--threads is a setting of a local run: not using the server at {with_server.url}\n"
    assert loads == [{"threads": 1}]


def test_a_path_is_loaded_here(invoke, loads, with_server):
    result = invoke("run", "./tiny", "Hello there", "--max-tokens", "3")

    assert result.stderr == f"./tiny is a path: not using the server at {with_server.url}\n"
    assert loads == [{"name": "./tiny"}]


def test_a_model_that_only_this_machine_has_is_loaded_here(invoke, loads, with_server, monkeypatch):
    monkeypatch.setattr("bough.cli.backends.known_models.is_here", lambda name, settings: name == "other")

    result = invoke("run", "other", "Hello there", "--max-tokens", "3")

    reason = "the server does not have other, and this machine does"
    assert result.stderr == f"{reason}: not using the server at {with_server.url}\n"
    assert loads == [{"name": "other"}]


def test_local_ignores_the_server(invoke, loads, with_server):
    assert invoke("run", "--local", "Hello there", "--max-tokens", "3").stderr == ""
    assert loads == [{}]


def test_local_and_url_contradict_each_other(invoke, with_server):
    result = invoke("run", "--local", "--url", with_server.url, "Hello there")

    assert (result.exit_code, result.stderr) == (1, "error: --local is for a local run, and does not go with --url\n")


def test_one_word_that_the_server_does_not_know_is_a_prompt(invoke, with_server):
    result = invoke("run", "Hello", "--max-tokens", "3")

    assert result.exit_code == 0
    assert result.stderr == "there is no model 'Hello': sending it as a prompt to tiny\n"


def test_each_choice_of_a_seed_has_its_own_text(backend):
    given = {"max_tokens": 12, "temperature": 2.0, "seed": 3}
    first = complete(backend, **given)

    assert complete(backend, **given).token_ids == first.token_ids
    assert complete(backend, choice=1, **given).token_ids != first.token_ids


def test_a_text_is_continued_without_the_template(backend):
    chat, text = complete(backend, max_tokens=1), complete(backend, "Hello there", max_tokens=1)

    assert text.usage.prompt_tokens < 5 < chat.usage.prompt_tokens  # the template's own tokens are more


def test_a_schema_shapes_the_answer(backend):
    assert complete(backend, format={"enum": ["Paris"]}).text == '"Paris"'


def test_progress_counts_from_what_is_cached(backend):
    told = []
    prompt = [{"role": "user", "content": "a message of its own, " * 40}]

    list(backend.stream(prompt, {"max_tokens": 1}, is_cancelled=lambda: False, on_progress=lambda *all: told.append(all)))

    (cached, total), *_, (done, _) = told
    assert cached < total == done


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"heat": 1}, "unknown parameter heat"),
        ({"top_k": 2**70}, "top_k is a number of more than 64 bits"),
        ({"format": {"enum": ["a" * 300_000]}}, "format has 300,004 characters"),
    ],
)
def test_a_bad_parameter_is_refused(backend, given, complaint):
    with pytest.raises(RequestError, match=complaint):
        complete(backend, **given)


def test_a_model_that_the_server_does_not_have_is_not_found(backend):
    with pytest.raises(ModelNotFound, match="nobody"):
        backend.change_model("nobody", SilentProgress())
    assert backend.name == "tiny"


def test_every_command_of_the_chat_works(backend, capsys):
    messages = iter(["Hello", "/retry", "/tree", "/show", "/explain And?", "/branch b", "/model tiny", "one", "/bye"])
    chat = TerminalChat(backend, Screen(), session=ChatSession(given={"max_tokens": 3}))

    run_chat(chat, lambda: next(messages))

    shown, told = capsys.readouterr()
    assert "<|im_start|>system" in shown and "because" in shown
    assert ["server", backend.url] in [line.split() for line in shown.splitlines()]
    assert "error" not in told and f"tiny on fake (CPU) at {backend.url}" in told
    assert [each.question for each in chat.conversation.exchanges] == ["Hello", "one"]


def test_a_stopped_answer_has_its_counts_and_the_server_keeps_the_work(backend, served):
    pieces: list[Any] = []
    prompt = [{"role": "user", "content": "stop this one"}]

    stream = backend.stream(
        prompt, {"max_tokens": 1500, "ignore_eos": True}, is_cancelled=lambda: len(pieces) > 5, on_progress=lambda *_: None
    )
    for piece in stream:
        pieces.append(piece)  # noqa: PERF402  # one by one: the stream looks at their number

    *texts, last = pieces
    assert last.finish_reason == "cancelled"
    assert last.text == "".join(each.text for each in texts)
    assert 0 < last.usage.completion_tokens < 1500
    assert last.usage.cached_tokens + last.usage.computed_tokens == last.usage.prompt_tokens
    again = complete(backend, prompt, max_tokens=1)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


def test_ctrl_c_stops_the_command_and_the_server_goes_on(with_server):
    environment = {**os.environ, "BOUGH_API_KEY": KEYS[0]}
    command = [sys.executable, "-m", "bough", "run", "Hello there", "--raw", "--seed", "1", "--temperature", "2"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=30) == 130
    assert httpx.get(f"{with_server.url}/health", timeout=10).status_code == 200


def test_with_a_server_neither_torch_nor_the_runner_is_imported(with_server):
    code = (
        "import sys; from bough.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print({'torch', 'transformers', 'bough.runner', 'bough.models'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "run", "Hello there", "--max-tokens", "2"]

    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "set()\n")


@contextmanager
def scripted(answers: dict[str, list[dict[str, Any]]], missing_bytes: int | None = None) -> Iterator[Client]:
    """A client of a server that answers to each path with these lines, and closes the connection.

    With `missing_bytes` the server announces so many bytes more than it sends.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = "".join(json.dumps(line) + "\n" for line in answers[self.path]).encode()
            self.send_response(200)
            if missing_bytes is not None:
                self.send_header("Content-Length", str(len(body) + missing_bytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        with Client(f"http://127.0.0.1:{server.server_port}") as client:
            yield client
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("missing_bytes", [None, 10])
def test_a_server_that_ends_in_the_middle_of_an_answer_is_told(missing_bytes):
    with scripted({"/api/run": [{"text": "half of", "num_tokens": 2}]}, missing_bytes) as client:
        pieces = RemoteBackend(client, {"model": "tiny"}).stream(HELLO, {}, **QUIET)

        assert next(pieces).text == "half of"
        with pytest.raises(Unavailable, match="ended in the middle of the answer"):
            next(pieces)


def test_an_error_in_the_middle_of_an_answer_is_told():
    with scripted({"/api/run": [{"text": "half of", "num_tokens": 2}, {"error": "it broke"}]}) as client:
        pieces = RemoteBackend(client, {"model": "tiny"}).stream(HELLO, {}, **QUIET)

        with pytest.raises(BoughError, match="it broke"):
            list(pieces)


def test_a_pull_by_the_server_is_reported():
    class Told(SilentProgress):
        def __init__(self) -> None:
            self.works: list[list[Any]] = []

        def start(self, label: str, total_bytes: int | None) -> None:
            self.works.append([label, total_bytes, 0])

        def advance(self, num_bytes: int) -> None:
            self.works[-1][2] += num_bytes

    weights = [{"status": "weights", "total": 9, "completed": done} for done in (0, 4, 9)]
    told = Told()

    with scripted({"/api/pull": [{"status": "looking"}, *weights, {"status": "success"}]}) as client:
        pull(client, "org/name", told)

    assert told.works == [["looking", None, 0], ["weights", 9, 9], ["success", None, 0]]


def test_a_wrong_key_is_denied(served):
    with Client(served.url, "another") as client, pytest.raises(AccessDenied, match="not valid"):
        RemoteBackend.open(client, None, SilentProgress())


def test_the_announced_server_is_found(served):
    client = find_client(Settings(cache_folder=served.cache_folder))

    assert client is not None and client.url == served.url
    client.close()
