"""Which backend answers: a running server if there is one, unless the command asks for what only a local run can do.

If a server is not used, a note says why. With a server the runner is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from bough.cli.backends import known_models
from bough.cli.backends.contract import Backend
from bough.cli.backends.remote import RemoteBackend, pull
from bough.cli.client import find_client
from bough.cli.prompt_args import is_like_a_path
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen
from bough.config import DEFAULT_MODEL, Settings, limit_thread_spinning
from bough.errors import ModelNotFound, RequestError
from bough.types import Progress


class Backends:
    """Opens a model in a running server, or else here. Use it in a `with` statement, for as long as its backend.

    `flags` are the settings that were given as flags, by name. Only a model in this process can follow them.
    """

    def __init__(
        self, settings: Settings, screen: Screen, *, url: str | None, is_local: bool, flags: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._screen = screen
        self._url = url
        self._flags = flags
        flag = "--local" if is_local else next((_flag_of(*each) for each in flags.items() if each[1] is not None), None)
        if url and flag:
            raise RequestError(f"{flag} is for a local run, and does not go with --url")
        self._client = find_client(settings, url, is_local=is_local)
        if flag is not None:
            self._decline(f"{flag} is a setting of a local run")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()

    def _decline(self, reason: str) -> None:
        if self._client is not None:
            self._screen.note(f"{reason}: not using the server at {self._client.url}")
            self._client.close()
            self._client = None

    @property
    def default_model(self) -> str:
        if self._client is None:
            return self._settings.model
        return self._chosen_model() or str(self._client.get("/health").get("model", DEFAULT_MODEL))

    def _chosen_model(self) -> str | None:
        """The model that the settings name. If it is the usual one, the server chooses."""
        return None if self._settings.model == DEFAULT_MODEL else self._settings.model

    @property
    def known(self) -> known_models.KnownModels:
        return known_models.KnownModels(self._settings, self._client)

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
                from bough.cli.backends.local import LocalBackend  # imports the runner

                backend: Backend = LocalBackend.open(
                    model,
                    self._flags,
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
        if wanted is not None and is_like_a_path(wanted) and not self._url:
            self._decline(f"{wanted} is a path")
            return None
        try:
            return RemoteBackend.open(client, wanted, progress)
        except ModelNotFound:
            if wanted is None:
                raise
            if not self._url and known_models.is_here(wanted, self._settings):
                self._decline(f"the server does not have {wanted}, and this machine does")
                return None
            if not known_models.can_fetch(wanted):
                raise
        pull(client, wanted, progress)
        return RemoteBackend.open(client, wanted, progress)


def _flag_of(name: str, value: object) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
