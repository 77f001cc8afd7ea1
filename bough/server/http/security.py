"""Access control: checks of the Host and Origin headers, CORS, and API keys.

A browser lets any web page send requests to this machine. No page can forge two headers: `Host`, which shows another name
that was made to point here (DNS rebinding), and `Origin`, the page that sends the request. A server with keys answers to
every name: a page without the key gets nothing from it, whatever name it uses.

The state of a request that passes has `salt` (of its tree), `sees_all` (whether it sees the trees of all salts),
`client_id` (the client's key or address, for rate limits) and `is_known` (false if the server has keys and the client sent
none; only open paths allow that, and they show such a client nothing of models or other clients).
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.config import Settings, read_cluster_secret
from bough.errors import AccessDenied, BoughError, RequestError
from bough.server.http.errors import ErrorFormatOf, refuse, to_http_error
from bough.server.http.keys import ApiKeys, Key, derive_salt, read_secret
from bough.system.announcement import PROOF_PATH

# These paths need no key. The first say that there is a server, which one, and whether it is healthy. The pages on the API
# and the files of the page at `/` are the same on every server, and a browser cannot send a key for a page.
OPEN_PATHS = frozenset(("/", "/health", "/health/live", "/health/ready", PROOF_PATH))
DOCS_PATH = "/docs"
SCHEMA_PATH = "/openapi.json"
PAGE_PATH = "/web"

MAX_SALT_LENGTH = 256
_LOCAL_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
_ANY_ADDRESS = frozenset(("0.0.0.0", "::", ""))
_APP_SCHEMES = ("app", "tauri", "vscode-webview", "vscode-file", "file")  # desktop programs, not web pages

_METHODS = "GET, HEAD, POST, PUT, DELETE, OPTIONS"
_HEADERS = (
    "accept, accept-language, authorization, cache-control, content-language, content-type, idempotency-key, "
    "traceparent, tracestate, user-agent, x-api-key, x-request-id, x-requested-with"
)
_HEADER_PREFIXES = ("x-stainless-", "anthropic-", "openai-", "x-bough-")
_SHOWN_HEADERS = "request-id, x-request-id, traceparent, retry-after"
_PREFLIGHT_S = "600"


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path in (DOCS_PATH, SCHEMA_PATH) or path.startswith((f"{DOCS_PATH}/", f"{PAGE_PATH}/"))


@dataclass(frozen=True)
class OriginRules:
    """Allowed hosts and origins as the settings give them, separated by commas; "*" allows all."""

    bound_host: str
    allowed_hosts: str
    origins: str
    has_keys: bool = False

    def allows_host(self, host_header: str) -> bool:
        """Whether a request may name this host. An IP address is safe: only names can be made to point here."""
        host, listed = _host_of(host_header), _split(self.allowed_hosts)
        if self.has_keys or "*" in listed or host in _LOCAL_HOSTS or host in listed or host_header.lower() in listed:
            return True
        if self.bound_host.lower() not in _ANY_ADDRESS:
            return host == self.bound_host.lower().strip("[]")
        with suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return False

    def allows_origin(self, origin: str, host_header: str) -> bool:
        """Whether a page of this origin may send requests: from this server, this machine, a desktop program, or listed."""
        listed = _split(self.origins)
        if "*" in listed or origin.lower().rstrip("/") in listed:
            return True
        try:
            parts = urlsplit(origin)
            host = (parts.hostname or "").lower()
        except ValueError:
            return False
        if parts.scheme in _APP_SCHEMES or f"{parts.scheme}://*" in listed:
            return True
        is_web = parts.scheme in ("http", "https")
        return is_web and (host in _LOCAL_HOSTS or parts.netloc.lower() == host_header.lower())


def _host_of(host_header: str) -> str:
    """The host without its port and brackets, in lower case."""
    host = host_header.strip().lower()
    if host.startswith("["):
        address, _, rest = host[1:].partition("]")
        return address if not rest or rest.startswith(":") else host
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _split(setting: str) -> frozenset[str]:
    return frozenset(each.strip().lower().rstrip("/") for each in setting.split(",") if each.strip())


class SecurityMiddleware:
    """Refuses requests from hosts, pages and clients that have no access."""

    def __init__(
        self, app: ASGIApp, settings: Settings, error_format_of: ErrorFormatOf, authenticator: Authenticator | None = None
    ) -> None:
        self._app = app
        self._error_format_of = error_format_of
        has_keys = settings.keys_file is not None
        self._origins = OriginRules(settings.host, settings.allowed_hosts, settings.origins, has_keys)
        self._authenticator = authenticator or Authenticator(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            self._check_host(scope, headers)
            if (origin := self._check_origin(headers)) is not None:
                send = _add_cors(send, origin)
                if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                    return await _preflight(headers)(scope, receive, send)
            self._authenticator.authenticate(scope, headers)
        except BoughError as error:
            return await refuse(to_http_error(error), self._error_format_of, scope, receive, send)
        return await self._app(scope, receive, send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        given = headers.getlist("host")
        if len(given) > 1 or (not given and scope["http_version"] != "1.0"):
            raise RequestError(f"the request has {len(given)} Host headers, and must have 1")
        if given and not self._origins.allows_host(given[0]):
            host = given[0][:100]
            ways = f"start it with --allowed-hosts {_host_of(host)}, or with --keys-file, which admits every name"
            raise AccessDenied(f"the host {host!r} is not one of this server's names: {ways}", needs_key=False)

    def _check_origin(self, headers: Headers) -> str | None:
        """The origin of the web page that sends the request, if any. Raises AccessDenied if it has no access."""
        origins = headers.getlist("origin")
        for origin in origins:
            if not self._origins.allows_origin(origin, headers.get("host", "")):
                text = f"pages of {origin[:100]!r} have no access to this server: add it to the setting origins"
                raise AccessDenied(text, needs_key=False)
        return origins[0] if origins else None


class Authenticator:
    """Checks the key of a client, if the server has keys, and finds the salt of its tree."""

    def __init__(self, settings: Settings) -> None:
        self._keys = ApiKeys(settings.keys_file) if settings.keys_file else None
        own_secret = read_cluster_secret(settings)  # with it, keys have the same salts on every machine
        self._secret = (own_secret or read_secret(settings.data_folder / "server_secret")) if self._keys else b""

    def authenticate(self, scope: Scope, headers: Headers) -> None:
        """Set the state of a request. Raises AccessDenied without a valid key, RequestError for an invalid salt."""
        state = scope.setdefault("state", {})
        client = scope.get("client")
        state |= {"salt": "", "sees_all": self._keys is None, "is_known": True, "client_id": client[0] if client else ""}
        if self._keys is None:
            state["salt"] = read_salt(_raw(headers, b"x-bough-salt"))
        elif is_open(scope["path"]):
            state["is_known"] = False
            with suppress(AccessDenied):
                _find_key(self._keys, headers)
                state["is_known"] = True
        else:
            key = _find_key(self._keys, headers)
            state |= {"client_id": f"key {key.digest.hex()}", "key_name": key.name}
            state["salt"] = derive_salt(self._secret, key, read_salt(_raw(headers, b"x-bough-salt")))


def read_salt(given: bytes) -> str:
    """The salt in a header. Raises RequestError if it is not printable text, or too long."""
    try:
        salt = given.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("X-Bough-Salt is not UTF-8") from error
    if len(salt) > MAX_SALT_LENGTH or not salt.isprintable():
        found = f"X-Bough-Salt has {len(salt)} characters"
        raise RequestError(f"{found}, and must have at most {MAX_SALT_LENGTH}, all printable")
    return salt


def _find_key(keys: ApiKeys, headers: Headers) -> Key:
    """The key of the client. Raises AccessDenied if it sends none, or a wrong one."""
    given = _raw(headers, b"x-api-key").strip()
    scheme, _, token = _raw(headers, b"authorization").strip().partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        given = token.strip()
    if not given:
        raise AccessDenied("this server needs a key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
    key = keys.find(given)
    if key is None:
        raise AccessDenied("the key is not valid")
    return key


def _raw(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers.raw if key == name), b"")


def _preflight(headers: Headers) -> Response:
    """The answer to the request that a browser sends before that of a page."""
    wanted = [each.strip().lower() for each in headers.get("access-control-request-headers", "").split(",")]
    granted = [each for each in wanted if each in _HEADERS.split(", ") or each.startswith(_HEADER_PREFIXES)]
    answer = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": ", ".join(granted) or _HEADERS,
        "Access-Control-Max-Age": _PREFLIGHT_S,
    }
    if headers.get("access-control-request-private-network") == "true":
        answer["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=answer)


def _add_cors(send: Send, origin: str) -> Send:
    """A `send` that adds the headers that let pages of this origin read the answer."""

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _SHOWN_HEADERS
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_cors
