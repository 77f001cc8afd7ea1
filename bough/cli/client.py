"""The HTTP client of the commands that ask a running server. Every failure raises a BoughError with a readable message."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bough.config import Settings
from bough.errors import AccessDenied, BoughError, ModelNotFound, RequestError, Unavailable
from bough.system.announcement import PROOF_PATH, read_announcement

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # the server may load a model before it answers
_PROOF_TIMEOUT_S = 3.0
_PIECE_BYTES = 2**20
_LOOPBACK_OF_WILDCARD = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def find_url(settings: Settings, url: str | None = None) -> str:
    """The address of the server: `url` if it is given, else the one in the settings."""
    if url:
        return (url if "://" in url else f"http://{url}").rstrip("/")
    host = _LOOPBACK_OF_WILDCARD.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


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
    try:
        with httpx.Client(base_url=announcement.url, timeout=_PROOF_TIMEOUT_S, trust_env=False) as http:
            proof = str(http.get(PROOF_PATH, params={"challenge": challenge}).json()["proof"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None
    is_it = hmac.compare_digest(proof.encode(), announcement.prove(challenge).encode())
    return Client(settings, announcement.url) if is_it else None


class Client:
    """Sends requests to one server. Use it in a `with` statement."""

    def __init__(self, settings: Settings, url: str | None = None) -> None:
        self.url = find_url(settings, url)
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        try:
            has_proxies = not _is_local(httpx.URL(self.url).host)
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=has_proxies)
        except (httpx.InvalidURL, ValueError) as error:
            raise RequestError(f"{self.url} is not the address of a server: {error}") from error

    def get(self, path: str, **params: str | None) -> Any:
        """Send a GET request and return the JSON of the response. Parameters that are None are left out."""
        return self._read(self._send("GET", path, params=_given(params)))

    def get_text(self, path: str, **params: str | None) -> str:
        return self._send("GET", path, params=_given(params)).text

    def delete(self, path: str, **params: str | None) -> Any:
        """Send a DELETE request and return the JSON of the response. Parameters that are None are left out."""
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
        """Send the fields as JSON and return the JSON of the response. Fields that are None are left out."""
        return self._read(self._send("POST", path, json=_given(fields)))

    def _send(self, method: str, path: str, **parts: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **parts)
        except httpx.ConnectError as error:
            raise Unavailable(f"no server at {self.url}; `bough serve` starts one") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(f"the server at {self.url} does not answer: {type(error).__name__}: {error}") from error
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()


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
    """The exception for an error response."""
    text = _error_text(response)
    if response.status_code == 401:
        return AccessDenied(f"{text}; set api_key (BOUGH_API_KEY) to a key of the server")
    if response.status_code == 404:
        return ModelNotFound(text)
    return RequestError(text) if response.status_code < 500 else Unavailable(text)


def _error_text(response: httpx.Response) -> str:
    try:
        found = response.json()["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered with status {response.status_code}"
