"""A model in a running server, by the routes /api/run, /api/cache and /api/pull. No engine is imported here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from bough.cache.admin.drawing import LEAST_WIDTH, MOST_WIDTH
from bough.cli.backends.contract import NO_TEMPLATE, GivenParams, describe_memory
from bough.cli.client import Client
from bough.errors import RequestError, Unavailable
from bough.types import Chunk, Completion, Loading, Message, Progress, Prompt, Timings, Usage

Record = TypeVar("Record", Usage, Timings, Loading)


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
        partial, completion = _PartialAnswer(on_progress), None
        with self._client.post_stream("/api/run", model=self.name, params=dict(given), choice=choice, **asked) as lines:
            for line in lines.read_until(is_cancelled):
                if "completion" in line:
                    completion = _read_completion(line["completion"])
                    continue  # to the end of the response: closing it earlier counts as hanging up
                if (piece := partial.add(line)) is not None:
                    yield piece
        if completion is None and not is_cancelled():
            raise Unavailable(f"the server at {self.url} ended in the middle of the answer")
        yield completion or partial.cancelled()

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


@dataclass
class _PartialAnswer:
    """An answer as far as it has come. If it is stopped, its completion is made from this."""

    on_progress: Callable[[int, int], None]
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    done_tokens: int = 0
    num_generated: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0

    def add(self, line: Mapping[str, Any]) -> Chunk | None:
        """Add a line of the stream, and return its piece of the answer if it has one."""
        if "progress" in line:
            self.done_tokens, self.prompt_tokens = line["progress"]
            if self.cached_tokens is None:
                self.cached_tokens = self.done_tokens
            self.on_progress(self.done_tokens, self.prompt_tokens)
            return None
        self.first_s = self.first_s or time.perf_counter() - self.began_s
        self.done_tokens = self.prompt_tokens
        self.num_generated += line["num_tokens"]
        self.texts.append(line["text"])
        return Chunk(line["text"])

    def cancelled(self) -> Completion:
        total_s, cached = time.perf_counter() - self.began_s, self.cached_tokens or 0
        usage = Usage(self.prompt_tokens, cached, cached, self.done_tokens - cached, self.num_generated)
        decode_s = total_s - self.first_s if self.first_s else 0.0
        timings = Timings(prefill_s=self.first_s or total_s, first_token_s=self.first_s, decode_s=decode_s, total_s=total_s)
        return Completion("".join(self.texts), (), "cancelled", usage, timings)


def _read_completion(plain: Mapping[str, Any]) -> Completion:
    timings = plain["timings"]
    return Completion(
        plain["text"],
        tuple(plain["token_ids"]),
        plain["finish_reason"],
        _read(Usage, plain["usage"]),
        _read(Timings, {**timings, "loading": _read(Loading, timings.get("loading", {}))}),
        stop=plain.get("stop"),
    )


def _read(kind: type[Record], plain: Mapping[str, Any]) -> Record:
    """A record of plain data. Fields that only another version has are left out."""
    known = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in plain.items() if name in known})
