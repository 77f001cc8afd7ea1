"""Which backend answers: a running server if there is one, unless the command asks for what only a local run can do.

A server that is not used, and why, is said once. With a server the runner is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from bough.cli.backends import names
from bough.cli.backends.contract import Backend
from bough.cli.backends.remote import RemoteBackend, pull
from bough.cli.client import Client, find_client
from bough.cli.prompt_args import is_like_a_path
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen
from bough.config import DEFAULT_MODEL, Settings, limit_thread_spinning
from bough.errors import ModelNotFound, RequestError
from bough.system.light_imports import load_torch_library
from bough.types import Progress


@dataclass(frozen=True)
class Where:
    """Where the command wants its model to run. `flags` are the settings that it was given, by name."""

    settings: Settings
    url: str | None = None
    is_local: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def local_flag(self) -> str | None:
        """A flag that only a model in this process can follow, if one was given."""
        if self.is_local:
            return "--local"
        return next((_flag_of(name, value) for name, value in self.flags.items() if value is not None), None)


def _flag_of(name: str, value: object) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


class Backends:
    """Opens a model in a running server, or else here. Use it in a `with` statement, for as long as its backend."""

    def __init__(self, where: Where, screen: Screen) -> None:
        self._where = where
        self._settings = where.settings
        self._screen = screen
        self._client = self._find_client()

    def _find_client(self) -> Client | None:
        where, flag = self._where, self._where.local_flag
        if where.url and flag:
            raise RequestError(f"{flag} is for a local run, and does not go with --url")
        client = find_client(where.settings, where.url, is_local=where.is_local)
        if client is None or flag is None:
            return client
        self._decline(client, f"{flag} is a setting of a local run")
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._client is not None:
            self._client.close()

    def _decline(self, client: Client, reason: str) -> None:
        """Do not use the server, and say why."""
        self._screen.note(f"{reason}: not using the server at {client.url}")
        client.close()

    @property
    def default_model(self) -> str:
        """The model that answers if none is named."""
        if self._client is None:
            return self._settings.model
        return self._chosen_model() or str(self._client.get("/health").get("model", DEFAULT_MODEL))

    def _chosen_model(self) -> str | None:
        """The model that the settings name. If it is the usual one, the server chooses."""
        return None if self._settings.model == DEFAULT_MODEL else self._settings.model

    def knows(self, name: str) -> bool:
        """Whether a word is a model: in the server, here, by its form a path, or one that can be fetched."""
        if is_like_a_path(name) or (self._client is not None and self._client.has_model(name)):
            return True
        return names.is_here(name, self._settings) or names.can_fetch(name)

    def find_near(self, name: str) -> str | None:
        """The model whose name was misspelt as this one, if any."""
        served = self._client.get("/api/tags")["models"] if self._client is not None else []
        return names.find_near(name, [*(each["name"] for each in served), *names.list_names(self._settings)])

    def open(self, model: str | None, *, tells_server: bool, tells_advice: bool = True) -> Backend:
        """The backend of a model by name or path; without one, of the default model. Raises ModelNotFound.

        With `tells_server`, a server that is used is named; with `tells_advice`, what to know about a local model.
        """
        advice: list[str] = []
        with show_progress(self._screen.notes, stays=False) as progress:
            remote = self._open_remote(model, progress)
            if remote is None:
                if self._settings.engine != "mlx":
                    limit_thread_spinning()  # before OpenMP is loaded with torch's library
                    load_torch_library()
                from bough.cli.backends.local import LocalBackend  # imports the runner

                backend: Backend = LocalBackend.open(
                    model,
                    self._where.flags,
                    progress,
                    lambda plan: self._screen.note(f"fetching {plan.describe()}"),
                    advice.append,
                )
            else:
                backend = remote
        for line in advice if tells_advice else ():
            self._screen.note(f"note: {line}")
        if remote is not None and tells_server:
            self._screen.note(f"using the server at {remote.url}; --local runs the model here")
        return backend

    def _open_remote(self, model: str | None, progress: Progress) -> RemoteBackend | None:
        """The model in the server, which fetches it if need be. None without a server, or if only this machine has it."""
        client, wanted = self._client, model or self._chosen_model()
        if client is None:
            return None
        if wanted is not None and is_like_a_path(wanted) and not self._where.url:
            self._decline(client, f"{wanted} is a path")
            return None
        try:
            return RemoteBackend.open(client, wanted, progress)
        except ModelNotFound:
            if wanted is None:
                raise
            if not self._where.url and names.is_here(wanted, self._settings):
                self._decline(client, f"the server does not have {wanted}, and this machine does")
                return None
            if not names.can_fetch(wanted):
                raise
        pull(client, wanted, progress)
        return RemoteBackend.open(client, wanted, progress)
