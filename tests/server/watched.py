"""What a client of the event stream knows: it applies one event after the other, as the documentation says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Nodes = dict[int, dict[str, Any]]


@dataclass
class Watched:
    """The state of a server as its events tell it, and the events as they came."""

    hello: dict[str, Any] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    trees: dict[str, dict[str, Nodes]] = field(default_factory=dict)  # by model and root
    requests: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by root and id
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def apply(self, event: str, text: str) -> None:
        told = json.loads(text)
        self.events.append((event, told))
        if event == "hello":
            self.hello = told
        elif event == "models":
            self.models = told["models"]
            names = {each["model"] for each in self.models}
            self.trees = {name: roots for name, roots in self.trees.items() if name in names}
        elif event == "tree":
            self._apply_tree(told)
        elif event == "request":
            self.requests[told["root"], told["id"]] = told
        elif event == "figures":
            self.figures[told["model"]] = told

    def _apply_tree(self, told: dict[str, Any]) -> None:
        if told["reset"]:
            self.trees[told["model"]] = {}
        roots = self.trees.setdefault(told["model"], {})
        for changed in told["roots"]:
            nodes = roots.setdefault(changed["root"], {})
            nodes.update({node["node"]: node for node in changed["nodes"]})
            for key in changed["gone"]:
                nodes.pop(key, None)
            if not nodes:
                del roots[changed["root"]]

    def named(self, event: str) -> list[dict[str, Any]]:
        """All events of one name, in the order in which they came."""
        return [told for name, told in self.events if name == event]
