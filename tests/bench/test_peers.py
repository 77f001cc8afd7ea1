"""`bough bench peers` against small servers: some tell less, refuse a field, or die. All over real HTTP."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from bough.bench import server as bench_server
from bough.bench.peers.client import Peer, PeerError
from bough.bench.peers.comparison import PeerMeasure, count_steps, lines, measure_peers, plot_peers, rows
from bough.bench.peers.workloads import PeerSetup, Texts, run_switching
from bough.bench.server import StreamedRequest
from bough.bench.workload import SwitchSetup
from bough.cli.main import app
from bough.errors import RequestError
from tests.waiting import BOUND_S

WIDE = {"COLUMNS": "200"}
SMALL = PeerSetup(1, 8, (10,), (20,), (3,), SwitchSetup(2, 2, 20, 5, 4))


class PlainServer:
    """A server with OpenAI's API whose answers are words; a subclass misbehaves in its own way."""

    listed: tuple[str, ...] = ("tiny",)
    tells_usage = True
    is_dead = False
    paths = ("/v1/completions", "/v1/chat/completions")

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []

    def list_models(self) -> list[str]:
        if self.is_dead:
            raise BrokenPipeError
        return list(self.listed)

    def refuse(self, body: dict[str, Any]) -> tuple[int, str] | None:
        return None

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        asked = body["prompt"] if "prompt" in body else "".join(each["content"] for each in body["messages"])
        for number in range(body["max_tokens"]):
            choice = {"text": f"{number} "} if "prompt" in body else {"delta": {"content": f"{number} "}}
            yield json.dumps({"choices": [choice]})
        if self.tells_usage and "stream_options" in body:
            num_words = len(asked.split())
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": num_words}
            yield json.dumps({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": num_words // 2}}})
        yield "[DONE]"


class SilentServer(PlainServer):
    """Tells no usage, lists no models."""

    tells_usage = False
    listed = ()


class StrictServer(PlainServer):
    """Knows neither `ignore_eos` nor `stream_options`."""

    def refuse(self, body: dict[str, Any]) -> tuple[int, str] | None:
        unknown = [name for name in ("stream_options", "ignore_eos") if name in body]
        return (422, f"extra field {unknown[0]}") if unknown else None


class ChatServer(PlainServer):
    """Has chats alone."""

    paths = ("/v1/chat/completions",)


class BrokenServer(PlainServer):
    """Answers chats, and fails in the middle of every other answer."""

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        if "messages" in body:
            yield from super().events(body)
        else:
            yield '{"choices": [{"text": "a"}]}'
            yield '{"error": {"message": "out of memory"}}'


class DyingServer(PlainServer):
    """Breaks the connection in its third answer, and every one after that."""

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        yield '{"choices": [{"text": "a"}]}'
        if self.is_dead:
            raise BrokenPipeError
        yield '{"choices": [{"text": "b"}], "usage": {"completion_tokens": 2, "prompt_tokens": 9}}'

    @property
    def is_dead(self) -> bool:
        return len(self.bodies) >= 3


class EndlessServer(PlainServer):
    """Answers until its client has gone."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        try:
            while True:
                yield '{"choices": [{"text": "a"}]}'
        finally:
            self.is_over.set()


class DroppingServer(DyingServer):
    """Breaks the connection in its third answer alone."""

    @property
    def is_dead(self) -> bool:
        return len(self.bodies) == 3

    def list_models(self) -> list[str]:
        return ["tiny"]


Serve = Callable[..., Peer]


def _make_handler(server: PlainServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            with self._dropping():
                self._answer(200, {"data": [{"id": name} for name in server.list_models()]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path not in server.paths:
                return self._answer(404, {"error": "no such path"})
            if refusal := server.refuse(body):
                return self._answer(refusal[0], {"error": {"message": refusal[1]}})
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()
            with self._dropping():
                for event in server.events(body):
                    self.wfile.write(f"data: {event}\n\n".encode())
            return None

        @contextmanager
        def _dropping(self) -> Iterator[None]:
            try:
                yield
            except BrokenPipeError:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end
                self.connection.close()

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server, and give a peer for it."""
    with ExitStack() as stack:

        def start(server: PlainServer, name: str = "peer", **options: Any) -> Peer:
            http = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(server)))
            http.daemon_threads = True
            http.handle_error = lambda request, client_address: None  # type: ignore[method-assign,misc]
            stack.callback(http.shutdown)
            threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
            peer = stack.enter_context(closing(Peer.parse(f"{name}=http://127.0.0.1:{http.server_port}/v1/", **options)))
            peer.connect()
            return peer

        yield start


@pytest.mark.parametrize(
    ("address", "name", "url", "model"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080", "http://127.0.0.1:8080", ""),
        ("ollama=http://host:11434/v1/#qwen3:0.6b", "ollama", "http://host:11434", "qwen3:0.6b"),
        ("https://host/models/v1", "host/models", "https://host/models", ""),
    ],
)
def test_an_address_may_have_a_name_and_a_model(address: str, name: str, url: str, model: str) -> None:
    with closing(Peer.parse(address)) as peer:
        assert (peer.name, peer.url, peer.model) == (name, url, model)


@pytest.mark.parametrize("address", ["", "127.0.0.1:8080", "name=", "ftp://host", "http://a b"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(RequestError, match="is not an address such as"):
        Peer.parse(address)


def test_an_answer_is_counted_by_the_servers_usage(serve: Serve) -> None:
    server = PlainServer()
    peer = serve(server, api_key="secret")

    received = peer.complete("one two three four", 5)

    assert (received.tokens, received.counted_by, received.prompt_tokens, received.cached_tokens) == (5, "usage", 4, 2)
    assert received.text == "0 1 2 3 4 " and 0 < received.first_s <= received.last_s
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["ignore_eos"], body["max_tokens"]) == ("tiny", 0, True, 5)
    assert server.keys == ["Bearer secret"]


def test_without_a_usage_pieces_are_counted_and_that_is_said(serve: Serve) -> None:
    peer = serve(SilentServer())

    received = peer.chat([{"role": "user", "content": "hello"}], 5)

    assert (received.tokens, received.counted_by, received.prompt_tokens, received.cached_tokens) == (
        5,
        "pieces",
        None,
        None,
    )
    assert peer.notes == [
        "is asked for the model default, because it lists none",
        "tells no usage: its tokens are counted by pieces of text",
    ]


def test_a_server_is_asked_again_without_what_it_refuses(serve: Serve) -> None:
    server = StrictServer()
    peer = serve(server)

    assert [peer.complete("a", 3).tokens for _ in range(2)] == [3, 3]

    assert all("ignore_eos" not in body and "stream_options" not in body for body in server.bodies)
    assert peer.notes[1:] == [
        "tells no usage: its tokens are counted by pieces of text",
        "is asked without ignore_eos and stream_options: 422 extra field stream_options; 422 extra field ignore_eos",
    ]


def test_a_request_that_is_refused_without_any_option_fails_with_the_servers_words(serve: Serve) -> None:
    server = PlainServer()
    server.refuse = lambda body: (400, "no")  # type: ignore[method-assign]

    peer = serve(server)
    with pytest.raises(PeerError, match="peer: 400 no"):
        peer.complete("a", 3)

    del server.refuse  # it was about that one request
    assert peer.complete("a", 3).counted_by == "usage"


def test_a_server_with_chats_alone_gets_prompts_as_chats(serve: Serve) -> None:
    server = ChatServer()
    peer = serve(server)

    assert peer.complete("hello", 3).tokens == 3

    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert "has no /v1/completions: prompts are sent as chats" in peer.notes


def test_a_server_that_nobody_runs_cannot_be_reached() -> None:
    with (
        closing(Peer.parse("http://127.0.0.1:9")) as peer,
        pytest.raises(PeerError, match="cannot be reached: ConnectError"),
    ):
        peer.connect()


def test_an_answer_can_be_given_up_after_its_first_piece_and_the_server_notices(serve: Serve) -> None:
    server = EndlessServer()
    with httpx.Client() as client:
        for _ in StreamedRequest(client, f"{serve(server).url}/v1/completions", {"prompt": "a"}):
            break

    assert server.is_over.wait(BOUND_S)


def test_an_endless_answer_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_server, "MAX_BYTES", 2_000)

    with pytest.raises(PeerError, match="took more than 300 s, 2,000 bytes"):
        serve(PlainServer()).complete("a", 1_000)


def test_all_workloads_run_on_all_servers_with_the_same_texts(serve: Serve, tmp_path) -> None:
    ours, theirs, steps = PlainServer(), PlainServer(), []
    peers = [serve(ours, "bough"), serve(theirs, "other")]

    report = measure_peers(peers, SMALL, "run 1", steps.append)

    names = [measure.name for measure in report.measures]
    assert names[:3] == ["decode after 10 tokens", "first token of 20 new tokens", "3 streams at once"]
    assert names[3:] == ["switching: first token of later turns", "switching: cached", "switching: all turns"]
    assert all(set(measure.values) == {"bough", "other"} and not measure.failures for measure in report.measures)
    assert sorted(map(str, ours.bodies)) == sorted(map(str, theirs.bodies))
    assert len(steps) == count_steps(SMALL)
    found = report.as_dict()
    assert found["measures"][4]["best"]["bough"] == pytest.approx(50, abs=2)
    assert list(found["measures"][0]["bough_against"]) == ["other"]
    assert json.dumps(found)
    plot_peers(report, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 0


def test_no_prompt_begins_as_another_of_any_round_or_run() -> None:
    texts = [Texts(run).make(50, seed) for run in ("a1", "b2") for seed in ("0 decode", "1 decode", "0 prefill")]

    assert len({text[:10] for text in texts}) == len(texts)


def test_a_server_that_fails_in_one_workload_goes_on_with_the_others(serve: Serve) -> None:
    report = measure_peers([serve(PlainServer(), "bough"), serve(BrokenServer(), "broken")], SMALL, "run 1")

    assert report.measures[0].failures == {"broken": "broken: out of memory"}
    assert report.measures[3].values["broken"] and not report.measures[3].failures
    assert next(rows(report))[3:] == ["failed", ""]
    failed = ", ".join(measure.name for measure in report.measures[:3])
    assert f"failed: {failed} (broken: out of memory)" in list(lines(report))


def test_a_server_that_dies_is_said_and_loses_the_others_nothing(serve: Serve) -> None:
    report = measure_peers([serve(PlainServer(), "bough"), serve(DyingServer(), "dying")], SMALL, "run 1")

    assert all(measure.values["bough"] for measure in report.measures)
    assert report.measures[1].failures["dying"].startswith(("dying: ReadError", "dying: RemoteProtocolError"))
    assert all("dying was lost before" in measure.failures["dying"] for measure in report.measures[2:])


def test_a_server_that_breaks_one_connection_is_asked_again(serve: Serve) -> None:
    peer = serve(DroppingServer())

    assert [peer.complete("a", 2).tokens for _ in range(2)] == [2, 2]
    with pytest.raises(PeerError, match="Error"):
        peer.complete("a", 2)
    assert peer.complete("a", 2).tokens == 2


def test_when_the_time_for_all_is_up_the_rest_is_left_out_and_that_is_said(serve: Serve) -> None:
    server = PlainServer()
    peer = serve(server)
    setup = replace(SMALL, limit_s=60.0)

    def end_after_the_first_case(name: str) -> None:
        peer.stop_at_s = 0.0

    report = measure_peers([peer], setup, "run 1", end_after_the_first_case)

    assert [bool(measure.values) for measure in report.measures] == [True, False, False, False, False, False]
    assert report.measures[-1].failures == {"peer": "peer: the time for all is up"}


def test_two_servers_of_one_name_are_refused(serve: Serve) -> None:
    with pytest.raises(RequestError, match="give them names, as in NAME=URL"):
        measure_peers([serve(PlainServer()), serve(PlainServer())], SMALL, "run 1")


def test_conversations_go_on_with_the_answers_of_their_own_server(serve: Serve) -> None:
    server = PlainServer()

    run_switching([serve(server)], SwitchSetup(1, 3, 10, 4, 2), "run 1")

    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles[2] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert server.bodies[2]["messages"][2]["content"] == "0 1 "


def test_a_ratio_above_one_is_ahead_whatever_the_unit() -> None:
    rate, wait = PeerMeasure("a", "tokens/s", True), PeerMeasure("b", "ms", False)
    for measure in (rate, wait):
        for server, values in {"bough": (20.0, 10.0), "other": (40.0, 80.0)}.items():
            for value in values:
                measure.add(server, value)

    assert (rate.best("bough"), wait.best("bough")) == (20, 10)
    assert (rate.ratio("bough", "other"), wait.ratio("bough", "other")) == (0.25, 4)
    assert rate.ratio("bough", "nobody") is None


def test_the_command_prints_a_table_and_ends_with_json(serve: Serve) -> None:
    bough, other = serve(PlainServer()), serve(SilentServer())
    small = ["--rounds", "1", "--tokens", "8", "--depth", "8", "--prefill", "8", "--streams", "2", "--turns", "2"]

    result = CliRunner().invoke(
        app, ["bench", "peers", f"other={other.url}", "--bough", bough.url, "--json", *small], env=WIDE
    )

    assert result.exit_code == 0, result.output
    assert "bough ÷ other" in result.stderr and "not told" in result.stderr
    assert "other tells no usage: its tokens are counted by pieces of text" in result.stderr
    assert len(json.loads(result.stdout.splitlines()[-1])["measures"]) == 6


def test_the_command_says_which_server_cannot_be_reached(serve: Serve) -> None:
    result = CliRunner().invoke(app, ["bench", "peers", "http://127.0.0.1:9", "--bough", serve(PlainServer()).url])

    assert result.exit_code == 1
    assert "error: http://127.0.0.1:9 cannot be reached" in result.stderr
