"""Real servers, each in a process of its own, started and stopped as a user would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.waiting import wait_until

START_S = 200  # loading and the check of the model, and on a busy machine the imports before them
STOP_S = 30
DISK_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Address:
    """A server that runs: where it is, and what it serves."""

    url: str  # without a slash at its end
    model: str
    cache_folder: Path

    @property
    def log(self) -> str:
        """What the server has said; of one in this process pytest shows it."""
        return ""


@dataclass(frozen=True)
class Server(Address):
    """A server in a process of its own, and what it has written so far."""

    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        """What the server has said."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")


StartServer = Callable[..., Address]
StartProcess = Callable[..., Server]


@contextmanager
def running(model: str, folder: Path, *, port: int | None = None, **settings: Any) -> Iterator[Server]:
    """A server of this model with these settings in its environment. It must end well when it is told to."""
    share_self_checks(folder)
    port = port or find_port()
    command = [sys.executable, "-m", "bough", "serve", "--model", model, "--port", str(port)]
    log_file = folder / "server.log"
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(folder, settings)
        )
    server = Server(f"http://127.0.0.1:{port}", Path(model).name, folder / "cache", process, log_file)
    try:
        _wait_until_ready(server)
        yield server
        stop(server)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def share_self_checks(folder: Path) -> None:
    """Let the server of this folder use the verdicts of those beside it: the default model's check takes some 6 s."""
    checks, shared = folder / "cache" / "self_checks", folder.parent / "self_checks"
    shared.mkdir(parents=True, exist_ok=True)
    checks.parent.mkdir(parents=True, exist_ok=True)
    if not checks.exists():
        checks.symlink_to(shared)


def find_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    chosen = {"cache_folder": folder / "cache", "disk": DISK_BYTES, "threads": 2} | settings
    return dict(os.environ) | {f"BOUGH_{name.upper()}": str(value) for name, value in chosen.items()}


def _wait_until_ready(server: Server) -> None:
    def is_ready() -> bool:
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}:\n{server.log[-4000:]}"
        with suppress(httpx.TransportError):
            return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        return False

    wait_until(is_ready, START_S, describe=lambda: f"for the server to be ready:\n{server.log[-4000:]}")


def wait_for_log(server: Server, text: str) -> None:
    """Wait until the server has said this: a request's line is written after its answer."""
    wait_until(lambda: text in server.log, describe=lambda: f"for the server to say {text!r}:\n{server.log[-4000:]}")


def stop(server: Server) -> None:
    """Tell the server to end, and see that it does so cleanly and soon."""
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the server still ran {STOP_S} s after SIGTERM:\n{server.log[-4000:]}") from None
    assert code == 0, f"the server ended with {code}:\n{server.log[-4000:]}"


def make_chat_folder(folder: Path, context_tokens: int = 2048) -> Path:
    """A random model with a tokenizer and a chat template: it is loaded within a second. Its own sampling is greedy."""
    from tests.tiny_models import make_folder  # imports torch

    tokenizer = byte_level(CHATML)
    make_folder("llama", folder, vocab_size=len(tokenizer), max_position_embeddings=context_tokens)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": 2}')
    return folder
