"""Who may ask: names, pages and keys."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from bough.config import Settings
from bough.errors import SettingsError
from bough.prompting.ask import tenant_of
from bough.server.app import error_format_of
from bough.server.http.keys import ApiKeys, read_secret
from bough.server.http.security import OriginRules, SecurityMiddleware
from tests.server.layers import Inner, call_raw, send_to

PAGE = "https://front.example"


def make_layer(folder: Path, **settings: Any) -> SecurityMiddleware:
    return SecurityMiddleware(
        Inner(), Settings(data_folder=folder / "data", cache_folder=folder / "cache", **settings), error_format_of
    )


def write_keys(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


@pytest.fixture
def keyed(tmp_path: Path) -> SecurityMiddleware:
    """A layer that admits alice and bob."""
    return make_layer(tmp_path, keys_file=write_keys(tmp_path, "# ours\nalices-key alice\n\nbobs-key\n"))


# Host


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:11435", "127.0.0.1:80", "[::1]:11435", "box.lan:11435"])
def test_local_names_and_the_bound_host_are_served(tmp_path: Path, host: str) -> None:
    layer = make_layer(tmp_path, host="box.lan")

    assert send_to(layer, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:11435", "evil.example:127", "[::1]evil.example"],
)
def test_a_foreign_name_that_points_here_is_refused_with_a_hint(tmp_path: Path, host: str) -> None:
    answer = send_to(make_layer(tmp_path), headers={"Host": host})

    assert answer.status_code == 403
    assert "--allowed-hosts" in answer.json()["error"] and "--keys-file" in answer.json()["error"]


def test_allowed_hosts_adds_names_and_a_star_allows_all(tmp_path: Path) -> None:
    listed, all_names = make_layer(tmp_path, allowed_hosts="a.example, b.example"), make_layer(tmp_path, allowed_hosts="*")

    assert send_to(listed, headers={"Host": "b.example:1"}).status_code == 200
    assert send_to(listed, headers={"Host": "c.example"}).status_code == 403
    assert send_to(all_names, headers={"Host": "c.example"}).status_code == 200


def test_bound_to_every_address_a_bare_address_is_served_and_a_name_is_not() -> None:
    visitors = OriginRules("0.0.0.0", "", "")

    assert visitors.allows_host("192.168.1.5:11435")
    assert not visitors.allows_host("evil.example:11435")


def test_a_server_with_keys_answers_to_every_name(keyed: SecurityMiddleware) -> None:
    headers = {"Host": "host.docker.internal:11435"}

    assert send_to(keyed, headers=headers | {"x-api-key": "alices-key"}).status_code == 200
    assert send_to(keyed, headers=headers).status_code == 401


def test_a_request_of_http_1_0_needs_no_host(tmp_path: Path) -> None:
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    old, new = (call_raw(make_layer(tmp_path), messages, http_version=version) for version in ("1.0", "1.1"))

    assert old[0]["status"] == 200
    assert new[0]["status"] == 400


def test_two_hosts_are_refused(tmp_path: Path) -> None:
    hosts = [(b"host", b"localhost"), (b"host", b"evil.example")]

    assert call_raw(make_layer(tmp_path), [], hosts)[0]["status"] == 400


# Origin


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173", "app://obsidian.md", "vscode-webview://1abc"],
)
def test_local_pages_and_programs_may_ask_and_read_the_answer(tmp_path: Path, origin: str) -> None:
    answer = send_to(make_layer(tmp_path), headers={"Origin": origin})

    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "Origin" in answer.headers["vary"]


@pytest.mark.parametrize(
    "origin", [PAGE, "null", "http://localhost.evil.example", "http://[", "https://evil.example:11435"]
)
def test_foreign_pages_may_not_ask(tmp_path: Path, origin: str) -> None:
    answer = send_to(make_layer(tmp_path), headers={"Origin": origin})

    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_foreign_page_is_refused_behind_a_local_one_too(tmp_path: Path) -> None:
    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"origin", PAGE.encode())]

    assert call_raw(make_layer(tmp_path), [], headers)[0]["status"] == 403


def test_a_page_of_the_same_host_may_ask(tmp_path: Path) -> None:
    layer = make_layer(tmp_path, allowed_hosts="box.example")

    assert send_to(layer, headers={"Host": "box.example:8080", "Origin": "http://box.example:8080"}).status_code == 200
    assert send_to(layer, headers={"Host": "box.example:8080", "Origin": "http://box.example:9090"}).status_code == 403


@pytest.mark.parametrize("origins", [PAGE, "*", "https://other.example, https://front.example/", "https://*"])
def test_the_setting_origins_adds_pages(tmp_path: Path, origins: str) -> None:
    assert send_to(make_layer(tmp_path, origins=origins), headers={"Origin": PAGE}).status_code == 200


def preflight(layer: SecurityMiddleware, origin: str = PAGE, **more: str) -> Any:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os,anthropic-version,x-evil",
    }
    return send_to(layer, "OPTIONS", "/v1/chat/completions", headers=asked | more)


def test_a_preflight_is_answered_with_the_headers_that_clients_send(tmp_path: Path) -> None:
    answer = preflight(make_layer(tmp_path, origins=PAGE))

    assert answer.status_code == 204
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].split(", ")
    assert allowed == ["authorization", "content-type", "x-stainless-os", "anthropic-version"]


def test_a_preflight_from_a_foreign_page_is_refused(tmp_path: Path) -> None:
    assert preflight(make_layer(tmp_path)).status_code == 403


def test_a_preflight_needs_no_key(keyed: SecurityMiddleware) -> None:
    assert preflight(keyed, "http://localhost:3000").status_code == 204


def test_a_preflight_for_a_private_network_is_granted(tmp_path: Path) -> None:
    answer = preflight(make_layer(tmp_path, origins=PAGE), **{"Access-Control-Request-Private-Network": "true"})

    assert answer.headers["access-control-allow-private-network"] == "true"


# Keys


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer alices-key"},
        {"x-api-key": "bobs-key"},
        {"Authorization": "Bearer ", "x-api-key": "bobs-key"},
    ],
)
def test_a_key_is_taken_from_either_header(keyed: SecurityMiddleware, headers: dict[str, str]) -> None:
    assert send_to(keyed, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer wrong", "Basic alices-key", "Bearer alices-ke", "Bearer alices-key2"]
)
def test_without_a_right_key_nothing_is_served(keyed: SecurityMiddleware, key: str) -> None:
    answer = send_to(keyed, headers={"Authorization": key} if key else {})

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_refusal_has_the_shape_of_the_api_that_was_asked(keyed: SecurityMiddleware) -> None:
    ollama, openai, anthropic = (
        send_to(keyed, "POST", path).json() for path in ("/api/chat", "/v1/chat/completions", "/v1/messages")
    )

    assert isinstance(ollama["error"], str)
    assert openai["error"]["type"] == "authentication_error"
    assert anthropic["type"] == "error" and anthropic["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/health/ready"])
def test_whether_there_is_a_server_may_be_asked_without_a_key(keyed: SecurityMiddleware, path: str) -> None:
    assert send_to(keyed, path=path).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/health/ready"])
@pytest.mark.parametrize(("key", "is_known"), [("alices-key", True), ("wrong", False), ("", False)])
def test_a_key_is_known_also_where_none_is_needed(keyed: SecurityMiddleware, path: str, key: str, is_known: bool) -> None:
    answer = send_to(keyed, path=path, headers={"x-api-key": key})

    assert answer.status_code == 200
    assert answer.json()["state"]["is_known"] is is_known


def test_a_salt_that_is_none_does_not_keep_anybody_from_an_open_path(keyed: SecurityMiddleware) -> None:
    headers = {"x-api-key": "alices-key", "x-bough-salt": "a" * 10_000}

    assert send_to(keyed, path="/health", headers=headers).status_code == 200


def test_where_there_are_no_keys_everybody_is_known(tmp_path: Path) -> None:
    assert send_to(make_layer(tmp_path), path="/health").json()["state"]["is_known"] is True


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics", "/redoc", "/docs-", "/openapi.json/", "/api/version", "/api/tags"),
        *("/v1/models", "/api/cache", "/health/", "//health", "/HEALTH", "/health/live/"),
    ],
)
def test_everything_else_needs_a_key(keyed: SecurityMiddleware, path: str) -> None:
    assert send_to(keyed, path=f"http://localhost{path}").status_code == 401


def test_a_byte_order_mark_at_the_start_of_the_file_is_no_part_of_a_key_or_a_comment(tmp_path: Path) -> None:
    assert ApiKeys(write_keys(tmp_path, "\ufeffa-key alice\n")).find(b"a-key") is not None
    keys = ApiKeys(write_keys(tmp_path, "\ufeff# ours\na-key alice\n"))
    assert keys.find(b"a-key") is not None
    assert keys.find("\ufeff#".encode()) is None


def test_the_keys_are_read_again_when_the_file_changes(tmp_path: Path) -> None:
    keys = ApiKeys(write_keys(tmp_path, "old-key\n"))

    write_keys(tmp_path, "a-new-key\n")

    assert keys.find(b"old-key") is None
    assert keys.find(b"a-new-key") is not None


def test_while_the_file_is_gone_nobody_is_admitted(tmp_path: Path) -> None:
    file = write_keys(tmp_path, "a-key\n")
    keys = ApiKeys(file)

    file.unlink()
    found = keys.find(b"a-key")
    write_keys(tmp_path, "a-key\n")

    assert found is None
    assert keys.find(b"a-key") is not None


def test_while_the_file_is_no_file_of_keys_nobody_is_admitted_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_keys(tmp_path, "a-key\n")
    keys = ApiKeys(file)

    file.write_bytes(bytes(range(256)))
    with caplog.at_level(logging.ERROR, "bough"):
        found = [keys.find(b"a-key") for _ in range(3)]

    assert found == [None, None, None]
    assert caplog.text.count("no key is valid") == 1


def test_a_key_that_is_there_twice_later_still_admits_its_client(tmp_path: Path) -> None:
    keys = ApiKeys(write_keys(tmp_path, "a-key\n"))

    write_keys(tmp_path, "a-key alice\na-key bob\n")

    assert keys.find(b"a-key") is not None


@pytest.mark.parametrize("path", ["/docs", "/docs/swagger-ui.css", "/openapi.json"])
def test_the_pages_on_the_api_need_no_key(keyed: SecurityMiddleware, path: str) -> None:
    assert send_to(keyed, path=path).status_code == 200


@pytest.mark.parametrize("text", [None, "", "# only a comment\n", "a-key\0\n", "a-key alice\na-key bob\n"])
def test_a_file_without_keys_is_no_way_to_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        write_keys(tmp_path, text)

    with pytest.raises(SettingsError, match="key"):
        ApiKeys(file)


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bough"):
        ApiKeys(write_keys(tmp_path, "a-key\n", mode=0o644))

    assert "chmod 600" in caplog.text
    assert "a-key" not in caplog.text


# Salts


def salt_of(layer: SecurityMiddleware, **headers: str) -> str:
    answer = send_to(layer, headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert answer.status_code == 200, answer.text
    salt: str = answer.json()["state"]["salt"]
    return salt


def test_each_key_has_a_salt_of_its_own_that_stays_the_same(keyed: SecurityMiddleware, tmp_path: Path) -> None:
    again = make_layer(tmp_path, keys_file=tmp_path / "keys")  # as after a restart

    alice, bob = salt_of(keyed, x_api_key="alices-key"), salt_of(keyed, x_api_key="bobs-key")

    assert alice != bob
    assert salt_of(again, authorization="Bearer alices-key") == alice
    assert len(alice) == 64 and "alice" not in alice


def test_machines_with_the_same_secret_give_a_key_the_same_salt(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "alices-key\n")
    (same := tmp_path / "same").write_text("a secret of a few words")
    (other := tmp_path / "other").write_text("another secret here")
    layers = [
        make_layer(tmp_path / name, keys_file=keys, store_secret_file=secret)
        for name, secret in (("one", same), ("two", same), ("three", other))
    ]
    first, second, third = (salt_of(layer, x_api_key="alices-key") for layer in layers)
    assert first == second != third


def test_a_header_refines_the_salt_of_a_key_and_never_reaches_that_of_another(keyed: SecurityMiddleware) -> None:
    bob = salt_of(keyed, x_api_key="bobs-key")

    refined = {salt_of(keyed, x_api_key="alices-key", x_bough_salt=text) for text in ("", "one", "two", bob)}

    assert len(refined) == 4
    assert bob not in refined
    assert {tenant_of(salt) for salt in refined} == {salt_of(keyed, x_api_key="alices-key")}


def test_without_keys_the_header_is_the_salt(tmp_path: Path) -> None:
    layer = make_layer(tmp_path)

    assert salt_of(layer, x_bough_salt="team a") == "team a"
    assert salt_of(layer) == ""


@pytest.mark.parametrize("salt", ["x" * 257, "tab\there", b"\xff\xfe"])
def test_a_salt_that_is_too_long_or_no_text_is_refused(tmp_path: Path, salt: Any) -> None:
    answer = send_to(make_layer(tmp_path), headers={"X-Bough-Salt": salt})

    assert answer.status_code == 400
    assert "X-Bough-Salt" in answer.json()["error"]


def test_the_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "data" / "server_secret"

    first, second = read_secret(file), read_secret(file)

    assert first == second and len(first) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_a_damaged_secret_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "server_secret").write_bytes(b"short")

    with pytest.raises(SettingsError, match="5 bytes"):
        read_secret(tmp_path / "server_secret")
