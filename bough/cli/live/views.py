"""What is made of the events: a screen that is drawn again, a line for each change of a request, or lines of JSON."""

from __future__ import annotations

import json
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bough.cli.live.frame import draw_frame, draw_request
from bough.cli.live.mirror import Mirror
from bough.cli.terminal.screen import Screen

_LONG_LINE = 10_000  # columns: what is piped is never shortened


class View(Protocol):
    """Shows events. `refresh` is called when no event waits, and now and then besides."""

    def tell(self, event: str, data: dict[str, Any]) -> None: ...

    def tell_problem(self, problem: str) -> None:
        """The server has gone, and it will be tried again."""

    def refresh(self) -> None: ...


class JsonLines:
    """Each event as one line of JSON, for other programs."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def tell(self, event: str, data: dict[str, Any]) -> None:
        self._screen.write_line(json.dumps({"event": event, "data": data}, ensure_ascii=False))

    def tell_problem(self, problem: str) -> None:
        self._screen.note(problem)

    def refresh(self) -> None:
        """There is nothing to draw."""


class RequestLines:
    """A line whenever a request begins, comes to another state, or ends."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._mirror = Mirror()
        self._states: dict[str, str] = {}

    def tell(self, event: str, data: dict[str, Any]) -> None:
        if event == "hello":
            self._mirror = Mirror()
        self._mirror.apply(event, data)
        if event != "request" or self._states.get(data["id"]) == data["state"]:
            return
        self._states = {key: state for key, state in self._states.items() if key in self._mirror.requests}
        self._states[data["id"]] = data["state"]
        shown = draw_request(self._mirror.requests[data["id"]], _LONG_LINE, has_model=True)
        self._screen.write_line(shown.plain)

    def tell_problem(self, problem: str) -> None:
        self._screen.note(problem)

    def refresh(self) -> None:
        """All lines are written as they come."""


class LiveScreen:
    """The whole terminal, drawn again when something has changed on it. What was there before comes back at the end."""

    def __init__(self, console: Console, server: str) -> None:
        self._console = console
        self._server = server
        self._mirror = Mirror()
        self._problem = ""
        self._shown: list[Text] = []
        self._live = Live(console=console, screen=True, auto_refresh=False)

    def tell(self, event: str, data: dict[str, Any]) -> None:
        if event == "hello":
            self._mirror, self._problem = Mirror(), ""
        self._mirror.apply(event, data)

    def tell_problem(self, problem: str) -> None:
        self._problem = problem
        self.refresh()

    def refresh(self) -> None:
        width, height = self._console.size
        lines = draw_frame(self._mirror, self._server, width, height, self._problem)
        if lines == self._shown or (self._mirror.is_partial and not self._problem):
            return
        self._shown = lines
        self._live.update(Group(*lines), refresh=True)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
