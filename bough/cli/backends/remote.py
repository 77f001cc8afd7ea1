"""A model in a running server, by the routes /api/run, /api/cache and /api/pull. No engine is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from bough.cache.admin.drawing import LEAST_WIDTH, MOST_WIDTH
from bough.cli.backends.contract import NO_TEMPLATE, GivenParams, describe_memory
from bough.client.answers import stream_answer
from bough.client.http import Client
from bough.errors import RequestError
from bough.types import Chunk, Completion, Message, Progress, Prompt


class RemoteBackend:
    """A model of one server. Closing it closes neither the client nor the server's model."""

    def __init__(self, client: Client, facts: Mapping[str, Any]) -> None:
        self._client = client
        self._facts = facts

    @classmethod
    def open(cls, client: Client, model: str | None, progress: Progress) -> RemoteBackend:
        """Have the server load a model; without a name, its default one. Raises ModelNotFound if it does not have it."""
        return cls(client, _load(client, model, progress))

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def name(self) -> str:
        return str(self._facts["model"])

    @property
    def model(self) -> str:
        return self.name

    @property
    def load_s(self) -> float:
        return float(self._facts["load_s"])

    @property
    def chat_problem(self) -> str:
        return "" if self._facts["has_template"] else NO_TEMPLATE

    def greeting(self) -> str:
        return f"{self.name} on {self._facts['engine']} ({self._facts['device']}) at {self.url}"

    def describe(self) -> dict[str, str]:
        return {
            "model": self.name,
            "server": self.url,
            "engine": str(self._facts["engine"]),
            "device": str(self._facts["device"]),
            "weights": str(self._facts.get("weights", "")),  # a server of an earlier version does not have these two
            "step": str(self._facts.get("step", "")),
            "context": f"{self._facts['context_tokens']:,} tokens",
            **self._describe_memory(),
        }

    def _describe_memory(self) -> dict[str, str]:
        try:
            (figures,) = self._client.get("/api/cache", model=self.name)["models"]
        except RequestError:
            return {"memory": "the model is not loaded now: the next message loads it"}
        return describe_memory(figures)

    def stream(
        self,
        prompt: Prompt,
        given: GivenParams,
        *,
        choice: int = 0,
        is_cancelled: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> Iterator[Chunk | Completion]:
        asked: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        body = {"model": self.name, "params": dict(given), "choice": choice, **asked}
        return stream_answer(self._client, body, is_cancelled=is_cancelled, on_progress=on_progress)

    def draw_tree(self, width: int | None) -> str:
        columns = None if width is None else str(min(max(LEAST_WIDTH, width), MOST_WIDTH))
        return self._client.get_text("/api/cache/tree", model=self.name, format="text", width=columns)

    def explain(self, messages: list[Message]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._client.post("/api/cache/explain", model=self.name, messages=messages)
        return found

    def change_model(self, name: str, progress: Progress) -> None:
        self._facts = _load(self._client, name, progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def pull(client: Client, model: str, progress: Progress) -> None:
    """Have the server fetch a model. Raises ModelNotFound if it knows no source for it."""
    label, done_bytes = "", 0
    with client.post_stream("/api/pull", model=model) as lines:
        for line in lines.read_until(lambda: False):
            total_bytes = line.get("total")
            if line["status"] != label:
                label, done_bytes = line["status"], 0
                progress.start(label, total_bytes)
            progress.advance(line.get("completed", 0) - done_bytes)
            done_bytes = line.get("completed", 0)


def _load(client: Client, model: str | None, progress: Progress) -> Mapping[str, Any]:
    progress.start(f"loading {model or 'the default model'}", None)
    found: Mapping[str, Any] = client.post("/api/run/load", model=model)
    return found
