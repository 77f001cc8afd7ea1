"""Following the events of a server until Ctrl-C. A server that goes away is tried again, after longer and longer waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from bough.cli.client import Client, LineStream
from bough.cli.live.views import View
from bough.errors import Unavailable

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0

_POLL_S = 0.25  # how soon a terminal of another size is noticed

Connect = Callable[[], Client]


def watch(
    connect: Connect, view: View, model: str | None, salt: str = "", wait: Callable[[float], None] = time.sleep
) -> None:
    """Tell the view the events of the server, or those of one model or one salt. Returns never.

    Raises BoughError if the server cannot be reached at first, refuses, or does not have the model.
    """
    wait_s, has_begun = FIRST_WAIT_S, False
    while True:
        try:
            with connect() as client, client.watch("/api/events", salt, model=find_model(client, model)) as events:
                while not events.has_ended:
                    if _tell_news(events, view):
                        wait_s, has_begun = FIRST_WAIT_S, True
            raise Unavailable(f"the server at {client.url} has ended")
        except Unavailable as error:
            if not has_begun:
                raise
            view.tell_problem(f"{error}: trying again in {wait_s:g} s")
        wait(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _tell_news(events: LineStream, view: View) -> bool:
    """Wait a little for events, and tell all that have come. Whether there were any."""
    found = first = events.take(_POLL_S)
    while found is not None:
        view.tell(found["event"], found["data"])
        found = events.take(0)
    view.refresh()
    return first is not None


def find_model(client: Client, name: str | None) -> str | None:
    """The name under which the server tells of a model: an alias has none of its own. Raises ModelNotFound."""
    if name is None:
        return None
    found = client.post("/api/show", model=name)
    return str(found["details"]["parent_model"] or name).removesuffix(":latest")
