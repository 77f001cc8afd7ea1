"""The server that a command uses: where it is, and whether it is ours."""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import threading

import httpx

from bough.client.http import Client as Client  # all commands take it from here
from bough.client.http import is_encrypted
from bough.config import Settings
from bough.system.announcement import PROOF_PATH, read_announcement

_PROOF_TIMEOUT_S = 3.0
_MAX_PROOF_BYTES = 1_024


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
        return Client(url, settings.api_key)
    announcement = None if is_local else read_announcement(settings.cache_folder)
    if announcement is None:
        return None
    challenge = secrets.token_hex(16)
    proof = _ask_for_proof(announcement.url, challenge)
    is_it = hmac.compare_digest(proof.encode(), announcement.prove(challenge).encode())
    return Client(announcement.url, settings.api_key, is_here=True) if is_it else None


def _ask_for_proof(url: str, challenge: str) -> str:
    """The answer of the program at an address to a challenge; "" if there is none in time, or of another form.

    A thread asks, because the timeouts of a connection count from byte to byte.
    """
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with (
                httpx.Client(base_url=url, timeout=_PROOF_TIMEOUT_S, trust_env=False, verify=is_encrypted(url)) as http,
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
