"""The page at `/`, and its files: browsers get them, with headers that bind them; clients of Ollama get their text."""

from __future__ import annotations

import socket

import httpx
import pytest

from bough.server.apis.bough.page import FOLDER
from tests.server.servers import Address

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(params=["served", "keyed"])
def server(request: pytest.FixtureRequest) -> Address:
    """A server without keys, and one with keys: the page is the same."""
    found: Address = request.getfixturevalue(request.param)
    return found


def get_raw(server: Address, path: str) -> bytes:
    """The answer to a path that no client would send as it is."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: raw.recv(2**16), b""))


def test_a_browser_gets_the_page_which_may_load_nothing_from_elsewhere(server: Address) -> None:
    answer = httpx.get(server.url, headers=BROWSER)

    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert answer.content == (FOLDER / "index.html").read_bytes()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "accept" in answer.headers["vary"].lower()


def test_others_get_the_text_that_clients_of_ollama_look_for(server: Address) -> None:
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        answer = httpx.get(server.url, headers=headers)
        assert answer.text == "Ollama is running" and answer.headers["content-type"].startswith("text/plain")


def test_only_the_head_is_sent_to_who_asks_for_it(server: Address) -> None:
    for headers in ({}, BROWSER):
        answer = httpx.head(server.url, headers=headers)
        assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 0


def test_every_file_of_the_page_is_served_without_a_key_and_with_the_same_headers(server: Address) -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert files
    with httpx.Client(base_url=server.url) as client:
        for file in files:
            answer = client.get(f"/web/{file.relative_to(FOLDER).as_posix()}")
            assert answer.status_code == 200 and answer.content == file.read_bytes()
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        again = client.get("/web/index.html", headers={"If-None-Match": client.get("/web/index.html").headers["etag"]})
        assert again.status_code == 304


@pytest.mark.parametrize(
    "path",
    [
        *("/web/", "/web/nothing.js", "/web/../app.py", "/web/%2e%2e/app.py", "/web/..%2fapp.py", "/web//etc/passwd"),
        *("/web/%2e%2e%2f%2e%2e%2f__init__.py", "/web/..\\app.py", "/web/index.html%00.js"),
    ],
)
def test_nothing_but_the_files_of_the_page_is_served(server: Address, path: str) -> None:
    answer = get_raw(server, path)

    assert answer.split(b" ", 2)[1] == b"404"
    assert b"import" not in answer


def test_the_files_can_only_be_read(server: Address) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert httpx.request(method, f"{server.url}/web/index.html").status_code == 405
