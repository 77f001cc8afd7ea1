"""Access control: checks of the Host and Origin headers, CORS, and API keys.

The state of a request that passes has:
- `salt`: the salt of its tree;
- `sees_all`: whether the client sees the trees of all salts;
- `client_id`: who the client is, for rate limits;
- `is_known`: False if the server has keys and the client sent none. Only open paths allow that, and they tell such a client
  nothing of models or other clients.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.config import Settings, read_cluster_secret
from bough.errors import AccessDenied, BoughError, RequestError
from bough.server.http.errors import ErrorFormatOf, HttpError, refuse, to_http_error
from bough.server.http.keys import Key, Keys, derive_salt, read_salt, read_secret
from bough.server.http.origins import OriginRules, host_of
from bough.system.announcement import PROOF_PATH

OPEN_PATHS = frozenset(("/", "/health", "/health/live", "/health/ready", PROOF_PATH))
"""Paths that need no key: they say that there is a server, which one, and whether it is healthy."""

DOCS_PATH = "/docs"
SCHEMA_PATH = "/openapi.json"
"""The pages on the API need no key either: they are the same on every server, and a browser cannot send one for a page."""

PAGE_PATH = "/web"
"""The files of the page at `/`, for which the same holds."""

_METHODS = "GET, HEAD, POST, PUT, DELETE, OPTIONS"
_HEADERS = frozenset(
    (
        "accept",
        "accept-language",
        "authorization",
        "cache-control",
        "content-language",
        "content-type",
        "idempotency-key",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-api-key",
        "x-request-id",
        "x-requested-with",
    )
)
_HEADER_PREFIXES = ("x-stainless-", "anthropic-", "openai-", "x-bough-")
_SHOWN_HEADERS = "request-id, x-request-id, traceparent, retry-after"
_PREFLIGHT_S = "600"


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path in (DOCS_PATH, SCHEMA_PATH) or path.startswith((f"{DOCS_PATH}/", f"{PAGE_PATH}/"))


class SecurityMiddleware:
    """Refuses requests from hosts, pages and clients that have no access."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        error_format_of: ErrorFormatOf,
        authenticator: Authenticator | None = None,
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
            origin = self._check_origin(headers)
        except BoughError as error:
            return await refuse(to_http_error(error), self._error_format_of, scope, receive, send)
        if origin is not None:
            send = _CorsSender(send, origin)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return await _preflight(headers)(scope, receive, send)
        try:
            self._authenticator.authenticate(scope, headers)
        except BoughError as error:
            return await refuse(_with_challenge(to_http_error(error)), self._error_format_of, scope, receive, send)
        return await self._app(scope, receive, send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        given = headers.getlist("host")
        if len(given) > 1 or (not given and scope["http_version"] != "1.0"):
            raise RequestError(f"the request has {len(given)} Host headers, and must have 1")
        if given and not self._origins.allows_host(given[0]):
            raise AccessDenied(_describe_host(given[0][:100]), needs_key=False)

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
        self._keys = Keys(settings.keys_file) if settings.keys_file else None
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
            state["is_known"] = self._has_key(self._keys, headers)
        else:
            key = self._find_key(self._keys, headers)
            state |= {"client_id": f"key {key.digest.hex()}", "key_name": key.name}
            state["salt"] = derive_salt(self._secret, key, read_salt(_raw(headers, b"x-bough-salt")))

    def _has_key(self, keys: Keys, headers: Headers) -> bool:
        try:
            self._find_key(keys, headers)
        except AccessDenied:
            return False
        return True

    def _find_key(self, keys: Keys, headers: Headers) -> Key:
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


def _describe_host(given: str) -> str:
    """Why a host name is refused, and what to add so that it is not."""
    ways = f"start it with --allowed-hosts {host_of(given)}, or with --keys-file, which admits every name"
    return f"the host {given!r} is not one of this server's names: {ways}"


def _raw(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers.raw if key == name), b"")


def _with_challenge(http_error: HttpError) -> HttpError:
    if http_error.status != 401:
        return http_error
    return HttpError(
        http_error.status, http_error.text, "invalid_api_key", {**http_error.headers, "WWW-Authenticate": "Bearer"}
    )


def _preflight(headers: Headers) -> Response:
    """The answer to the request that a browser sends before that of a page."""
    wanted = [each.strip().lower() for each in headers.get("access-control-request-headers", "").split(",")]
    granted = [each for each in wanted if each in _HEADERS or each.startswith(_HEADER_PREFIXES)]
    answer = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": ", ".join(granted or sorted(_HEADERS)),
        "Access-Control-Max-Age": _PREFLIGHT_S,
    }
    if headers.get("access-control-request-private-network") == "true":
        answer["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=answer)


class _CorsSender:
    """Adds the headers that let pages of this origin read the answer."""

    def __init__(self, send: Send, origin: str) -> None:
        self._send = send
        self._origin = origin

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = self._origin
            headers["Access-Control-Expose-Headers"] = _SHOWN_HEADERS
            headers.add_vary_header("Origin")
        await self._send(message)
