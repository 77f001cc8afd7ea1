"""Which Host and Origin headers the server accepts.

A browser lets any web page send requests to this machine. No page can forge two headers: `Host`, which shows another name
that was made to point here (DNS rebinding), and `Origin`, the page that sends the request. A server with keys answers to
every name: a page that does not have the key gets nothing from it, whatever name it uses.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

LOCAL_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
_ANY_ADDRESS = frozenset(("0.0.0.0", "::", ""))
_APP_SCHEMES = ("app", "tauri", "vscode-webview", "vscode-file", "file")  # desktop programs, not web pages


@dataclass(frozen=True)
class OriginRules:
    """Allowed hosts and origins as the settings give them, separated by commas; "*" allows all."""

    bound_host: str
    allowed_hosts: str
    origins: str
    has_keys: bool = False

    def allows_host(self, host_header: str) -> bool:
        """Whether a request may name this host. An IP address is safe: only names can be made to point here."""
        if self.has_keys:
            return True
        host = host_of(host_header)
        listed = _listed(self.allowed_hosts)
        if "*" in listed or host in LOCAL_HOSTS or host in listed or host_header.lower() in listed:
            return True
        if self.bound_host.lower() in _ANY_ADDRESS:
            return _is_address(host)
        return host == self.bound_host.lower().strip("[]")

    def allows_origin(self, origin: str, host_header: str) -> bool:
        """Whether a page of this origin may send requests: from this server, this machine, a desktop program, or listed."""
        listed = _listed(self.origins)
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
        return is_web and (host in LOCAL_HOSTS or parts.netloc.lower() == host_header.lower())


def host_of(host_header: str) -> str:
    """The host without its port and brackets, in lower case."""
    host = host_header.strip().lower()
    if host.startswith("["):
        address, _, rest = host[1:].partition("]")
        return address if not rest or rest.startswith(":") else host
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _listed(text: str) -> frozenset[str]:
    return frozenset(each.strip().lower().rstrip("/") for each in text.split(",") if each.strip())


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
