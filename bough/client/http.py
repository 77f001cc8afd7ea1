"""An HTTP client of one running server. Every failure raises a BoughError with a readable message."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx

from bough.errors import AccessDenied, BoughError, ModelNotFound, RequestError, Unavailable

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # the server may load a model before it answers
_STREAM_TIMEOUT = httpx.Timeout(None, connect=10.0)  # a long prompt may be computed for minutes before the first line
_POLL_S = 0.05
_PIECE_BYTES = 2**20


class Client:
    """Sends requests to one server. Use it in a `with` statement. One that `is_here`, on this machine, needs no proxy."""

    def __init__(self, url: str, key: str | None = None, *, is_here: bool = False) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._is_here = is_here
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
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
            verify=is_encrypted(self.url),
        )

    def get(self, path: str, of_salt: str = "", **params: str | None) -> Any:
        """Send a GET request and return the JSON of the response. In all requests, values that are None are left out."""
        return self._read(self._send("GET", path, params=_given(params), headers=_salt_header(of_salt)))

    def get_text(self, path: str, **params: str | None) -> str:
        return self._send("GET", path, params=_given(params)).text

    def delete(self, path: str, of_salt: str = "", **params: str | None) -> Any:
        return self._read(self._send("DELETE", path, params=_given(params), headers=_salt_header(of_salt)))

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
        headers = _salt_header(salt) | {b"Content-Length": str(file.stat().st_size).encode()}
        with file.open("rb") as content:
            pieces = iter(lambda: content.read(_PIECE_BYTES), b"")
            return self._read(self._send("POST", path, params=_given(params), content=pieces, headers=headers))

    def post(self, path: str, of_salt: str = "", **fields: Any) -> Any:
        """Send the fields as JSON and return the JSON of the response."""
        return self._read(self._send("POST", path, json=_given(fields), headers=_salt_header(of_salt)))

    def has_model(self, name: str) -> bool:
        try:
            self._send("POST", "/api/show", json={"model": name})
        except ModelNotFound:
            return False
        return True

    def post_stream(self, path: str, of_salt: str = "", **fields: Any) -> LineStream:
        """Send the fields as JSON; yields the lines of the response as they come. Close the stream."""
        self._require_open()
        http = self._connect(_STREAM_TIMEOUT)
        http.headers.update(_salt_header(of_salt))
        return LineStream(http, self.url, path, _given(fields))

    def _require_open(self) -> None:
        if self._http.is_closed:
            raise RequestError(f"the connection to {self.url} is closed")

    def _send(self, method: str, path: str, **parts: Any) -> httpx.Response:
        self._require_open()
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

    It has its own connection, which that thread closes. Leaving it, even before the first line, cancels the request.
    """

    def __init__(self, http: httpx.Client, url: str, path: str, fields: dict[str, Any]) -> None:
        self._http = http
        self._url = url
        self._found: queue.SimpleQueue[dict[str, Any] | BoughError | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._is_left = False
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
        finally:
            self._http.close()

    def _note_socket(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._socket = info["return_value"].get_extra_info("socket")
            if self._is_left:  # while it connected
                self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads


def _lines_of(response: httpx.Response) -> Iterator[str]:
    """The lines of a response as they come. Only a line feed ends one: JSON may have Unicode's other line breaks in it."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)
    if rest:
        yield rest.decode()


def is_encrypted(url: str) -> bool:
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


def _salt_header(salt: str) -> dict[bytes, bytes]:
    if not isinstance(salt, str):
        raise RequestError(f"salt is {salt!r:.80}, and must be a text")
    return {b"X-Bough-Salt": salt.encode()} if salt else {}


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
