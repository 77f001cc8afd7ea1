"""The HTTP client of the commands that use a running server. Every failure raises a BoughError with a readable message."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx

from bough.config import Settings
from bough.errors import AccessDenied, BoughError, ModelNotFound, RequestError, Unavailable
from bough.system.announcement import PROOF_PATH, read_announcement

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # the server may load a model before it answers
_STREAM_TIMEOUT = httpx.Timeout(None, connect=10.0)  # a long prompt may be computed for minutes before the first line
_PROOF_TIMEOUT_S = 3.0
_MAX_PROOF_BYTES = 1_024
_POLL_S = 0.05
_PIECE_BYTES = 2**20


def find_url(settings: Settings, url: str | None = None) -> str:
    """The address of the server: `url` if it is given, else the one in the settings."""
    if url:
        return (url if "://" in url else f"http://{url}").rstrip("/")
    host = settings.host or "0.0.0.0"
    return local_url(f"http://{f'[{host}]' if ':' in host else host}:{settings.port}")


def local_url(url: str) -> str:
    """The address at which commands on this machine reach a server that listens at all addresses."""
    return url.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")


def find_client(settings: Settings, url: str | None = None, *, is_local: bool = False) -> Client | None:
    """A client of the running server: that at `url` if it is given, else the one that `server.json` announces.

    None if no server is announced, if the program at its address is another one, or if `is_local`.
    """
    if url:
        return Client(settings, url)
    announcement = None if is_local else read_announcement(settings.cache_folder)
    if announcement is None:
        return None
    challenge = secrets.token_hex(16)
    proof = _ask_for_proof(announcement.url, challenge)
    is_it = hmac.compare_digest(proof.encode(), announcement.prove(challenge).encode())
    return Client(settings, announcement.url, is_here=True) if is_it else None


def _ask_for_proof(url: str, challenge: str) -> str:
    """The answer of the program at an address to a challenge; "" if there is none in time, or of another form.

    A thread asks, because the timeouts of a connection count from byte to byte.
    """
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with (
                httpx.Client(base_url=url, timeout=_PROOF_TIMEOUT_S, trust_env=False, verify=_is_encrypted(url)) as http,
                http.stream("GET", PROOF_PATH, params={"challenge": challenge}) as response,
            ):
                body = next(response.iter_bytes(_MAX_PROOF_BYTES), b"")
                found.put(str(json.loads(body)["proof"]))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError, RecursionError):
            found.put("")

    threading.Thread(target=ask, daemon=True).start()
    try:
        return found.get(timeout=_PROOF_TIMEOUT_S)
    except queue.Empty:
        return ""


class Client:
    """Sends requests to one server. Use it in a `with` statement. One that `is_here`, on this machine, needs no proxy."""

    def __init__(self, settings: Settings, url: str | None = None, *, is_here: bool = False) -> None:
        self.url = find_url(settings, url)
        self._is_here = is_here
        self._headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        try:
            self._http = self._connect(_TIMEOUT)
        except (httpx.InvalidURL, ValueError) as error:
            raise RequestError(f"{self.url} is not the address of a server: {error}") from error

    def _connect(self, timeout: httpx.Timeout) -> httpx.Client:
        has_proxies = not (self._is_here or _is_local(httpx.URL(self.url).host))
        return httpx.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=timeout,
            trust_env=has_proxies,
            verify=_is_encrypted(self.url),
        )

    def get(self, path: str, **params: str | None) -> Any:
        """Send a GET request and return the JSON of the response. In all requests, values that are None are left out."""
        return self._read(self._send("GET", path, params=_given(params)))

    def get_text(self, path: str, **params: str | None) -> str:
        return self._send("GET", path, params=_given(params)).text

    def delete(self, path: str, **params: str | None) -> Any:
        return self._read(self._send("DELETE", path, params=_given(params)))

    def download(self, path: str, file: Path, salt: str = "", **params: str | None) -> None:
        """Send a POST request and write the body of the response to a new file as it comes. A failure leaves no file."""
        with file.open("xb") as output:
            try:
                with self._http.stream("POST", path, params=_given(params), headers=_salt_header(salt)) as response:
                    if response.is_error:
                        response.read()
                        raise _to_error(response)
                    for piece in response.iter_bytes():
                        output.write(piece)
            except BaseException as error:
                file.unlink(missing_ok=True)
                if isinstance(error, httpx.HTTPError):
                    raise Unavailable(f"the server at {self.url} did not send the whole of it: {error!r}") from error
                raise

    def upload(self, path: str, file: Path, salt: str = "", **params: str | None) -> Any:
        """Send a file as the body of a POST request and return the JSON of the response."""
        headers = _salt_header(salt) | {"Content-Length": str(file.stat().st_size)}
        with file.open("rb") as content:
            pieces = iter(lambda: content.read(_PIECE_BYTES), b"")
            return self._read(self._send("POST", path, params=_given(params), content=pieces, headers=headers))

    def post(self, path: str, **fields: Any) -> Any:
        """Send the fields as JSON and return the JSON of the response."""
        return self._read(self._send("POST", path, json=_given(fields)))

    def has_model(self, name: str) -> bool:
        try:
            self._send("POST", "/api/show", json={"model": name})
        except ModelNotFound:
            return False
        return True

    def post_stream(self, path: str, **fields: Any) -> LineStream:
        """Send the fields as JSON; yields the lines of the response as they come. Close the stream."""
        return LineStream(self._connect(_STREAM_TIMEOUT), self.url, path, _given(fields))

    def _send(self, method: str, path: str, **parts: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **parts)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _to_unavailable(error, self.url) from error
        if response.is_error:
            raise _to_error(response)
        return response

    def _read(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise BoughError(f"the program at {self.url} is not a Bough server: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()


class LineStream:
    """The JSON objects in the lines of one response. A thread reads, so that the wait for the next can be given up.

    It has its own connection. Closing it, even before the first line, cancels the request.
    """

    def __init__(self, http: httpx.Client, url: str, path: str, fields: dict[str, Any]) -> None:
        self._http = http
        self._url = url
        self._found: queue.SimpleQueue[dict[str, Any] | BoughError | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        threading.Thread(target=self._read, args=(path, fields), daemon=True).start()

    def read_until(self, is_cancelled: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield the objects up to the end of the response, or until `is_cancelled`.

        Raises BoughError for an error response, for a line with an error, and if the connection breaks.
        """
        while not is_cancelled():
            try:
                found = self._found.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(found, BoughError):
                raise found
            if found is None:
                return
            if "error" in found:
                raise BoughError(str(found["error"]))
            yield found

    def _read(self, path: str, fields: dict[str, Any]) -> None:
        has_begun = False
        try:
            with self._http.stream("POST", path, json=fields, extensions={"trace": self._note_socket}) as response:
                if response.is_error:
                    response.read()
                    return self._found.put(_to_error(response))
                has_begun = True
                for line in _lines_of(response):
                    self._found.put(json.loads(line))
            self._found.put(None)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            broken = Unavailable(f"the server at {self._url} ended in the middle of the answer")
            self._found.put(broken if has_begun else _to_unavailable(error, self._url))
        except ValueError as error:
            self._found.put(BoughError(f"the program at {self._url} is not a Bough server: {error}"))

    def _note_socket(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._socket = info["return_value"].get_extra_info("socket")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone would not wake the thread that reads
        self._http.close()


def _lines_of(response: httpx.Response) -> Iterator[str]:
    """The lines of a response as they come. Only a line feed ends one: JSON may have Unicode's other line breaks in it."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)
    if rest:
        yield rest.decode()


def _is_encrypted(url: str) -> bool:
    """Whether certificates are checked: reading those of this machine takes longer than a request to a local server."""
    return url.lower().startswith("https:")


def _to_unavailable(error: Exception, url: str) -> Unavailable:
    if isinstance(error, httpx.ConnectError):
        return Unavailable(f"no server at {url}; `bough serve` starts one")
    return Unavailable(f"the server at {url} does not answer: {type(error).__name__}: {error}")


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _salt_header(salt: str) -> dict[str, str]:
    return {"X-Bough-Salt": salt} if salt else {}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _to_error(response: httpx.Response) -> BoughError:
    try:
        found = response.json()["error"]
        text = str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        text = f"{response.request.url} answered with status {response.status_code}"
    if response.status_code == 401:
        return AccessDenied(f"{text}; set api_key (BOUGH_API_KEY) to a key of the server")
    if response.status_code == 404:
        return ModelNotFound(text)
    return RequestError(text) if response.status_code < 500 else Unavailable(text)
