"""The tree of a model in a server, by the routes of /api/cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bough.cache.admin.drawing import MIN_TOKENS, draw
from bough.cache.admin.node_view import NodeView, flatten
from bough.cache.admin.view import Explanation
from bough.client.http import Client
from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.runner.options import ask_of_prompt
from bough.tokens import pack
from bough.types import Message, Prompt


@dataclass(frozen=True)
class RemoteTree:
    """The tree of a server at one moment: the nodes below each root, by its salt. `str` draws it."""

    roots: dict[str, list[NodeView]]

    @property
    def nodes(self) -> list[NodeView]:
        """Every node, parents first."""
        return [view for nodes in self.roots.values() for view in flatten(nodes)]

    def as_dict(self, *, has_ids: bool = True) -> dict[str, Any]:
        return {salt: [node.as_dict(has_ids=has_ids) for node in nodes] for salt, nodes in self.roots.items()}

    def draw(self, width: int | None = None, depth: int | None = None, min_tokens: int = MIN_TOKENS) -> str:
        """As the tree of a model in this process is drawn."""
        return draw(self.roots, width, depth, min_tokens)

    def __str__(self) -> str:
        return self.draw()


class RemoteCache:
    """What a program may see and change of the tree. A salt is that of the client, within its key if it has one."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model

    def tree(self, salt: str | None = None) -> RemoteTree:
        """The tree at this moment, of one salt if asked."""
        found = self._client.get("/api/cache/tree", salt or "", model=self._model, ids="true")
        return RemoteTree({name: [_read_node(each) for each in nodes] for name, nodes in found["roots"].items()})

    def stats(self, salt: str | None = None) -> dict[str, Any]:
        """Numbers and bytes of the tree; of one salt, if asked. Raises RequestError if the model is not loaded now."""
        (found,) = self._client.get("/api/cache", salt or "", model=self._model)["models"]
        return {name: value for name, value in found.items() if name != "model"}

    def explain(self, prompt: Prompt, *, salt: str = "", **template: Any) -> Explanation:
        """How much of a prompt would be reused, and why no more."""
        return self._explain("explain", prompt, salt, template)

    def keep(self, prompt: Prompt, kept: bool = True, *, salt: str = "", **template: Any) -> Explanation:
        """Keep a prefix that is in the tree as a whole, or keep it no longer. Raises RequestError if it is not there."""
        return self._explain("keep" if kept else "unkeep", prompt, salt, template)

    def clear(self, salt: str | None = None) -> None:
        """Drop everything that no running request uses, on disk too; of one salt if asked."""
        self._client.delete("/api/cache", salt or "", model=self._model)

    def _explain(self, verb: str, prompt: Prompt, salt: str, template: Mapping[str, Any]) -> Explanation:
        body = {"model": self._model, **write_prefix(prompt, template)}
        found = self._client.post(f"/api/cache/{verb}", salt, **body)
        known = {each.name: found[each.name] for each in fields(Explanation)}
        return Explanation(**known | {"tree_goes_on": tuple(known["tree_goes_on"])})


def write_prefix(prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    """A prefix as the body of a request for the cache. Raises RequestError for one that a server does not take."""
    ask = ask_of_prompt(prompt, options)
    if ask.ids is not None or ask.template_kwargs:
        raise RequestError("a server takes no token ids and no template_kwargs here: give a text or messages")
    return {"messages": write_messages(ask), "prompt": ask.text, "raw": not ask.is_message and ask.text is not None} | (
        {"tools": list(ask.tools)} if ask.tools else {}
    )


def write_messages(ask: Ask) -> list[Message] | None:
    """The messages of an ask as the server reads them: two fields have Ollama's names."""
    return None if ask.messages is None else [_write_message(each) for each in ask.messages]


def _write_message(message: Message) -> Message:
    written = {name: value for name, value in message.items() if name not in ("name", "reasoning_content")}
    return written | {"tool_name": message.get("name"), "thinking": message.get("reasoning_content")}


def _read_node(plain: Mapping[str, Any]) -> NodeView:
    text, children = plain["text"], [_read_node(each) for each in plain["children"]]

    def decode(ids: Sequence[int]) -> str:
        return str(text)

    known = {each.name: plain[each.name] for each in fields(NodeView) if each.name not in ("edge", "decode", "children")}
    lists = {name: tuple(known[name]) for name in ("points", "kept")}
    return NodeView(**known | lists, edge=pack(plain["token_ids"]), decode=decode, children=children)
