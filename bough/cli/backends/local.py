"""A model in this process. Importing this module imports the runner, so `bough run` does it only without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from bough.cli.backends.contract import NO_TEMPLATE, GivenParams, describe_memory
from bough.models import Announce
from bough.models.files import is_model_path
from bough.runner import Runner, load
from bough.runtime import Advise
from bough.types import Chunk, Completion, Message, Progress, Prompt

_ENGINE_FACTS = ("engine", "device", "dtype", "weights", "step", "attention")


class LocalBackend:
    """A runner. `settings` are the flags of the command, for other models that it loads."""

    def __init__(
        self, runner: Runner, model: str = "", load_s: float = 0.0, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.runner = runner
        self.load_s = load_s
        self._model = model
        self._settings = settings or {}

    @classmethod
    def open(
        cls,
        model: str | None,
        settings: Mapping[str, Any],
        progress: Progress,
        announce: Announce | None = None,
        advise: Advise | None = None,
    ) -> LocalBackend:
        """Load a model by name or path; without one, the default model."""
        started_s = time.perf_counter()
        progress.start(f"loading {model or 'the default model'}", None)
        runner = load(model, progress=progress, announce=announce, advise=advise, **settings)
        return cls(runner, model or "", time.perf_counter() - started_s, settings)

    @property
    def name(self) -> str:
        return self.runner.name

    @property
    def model(self) -> str:
        path = Path(self._model).expanduser()
        return str(path.resolve()) if self._model and is_model_path(path) else self._model or self.name

    @property
    def chat_problem(self) -> str:
        tokenizer, files = self.runner.runtime.tokenizer, self.runner.runtime.files
        if not tokenizer.has_text and files is not None and files.tokenizer_problem:
            return files.tokenizer_problem
        return "" if tokenizer.has_text and tokenizer.template.is_present else NO_TEMPLATE

    def greeting(self) -> str:
        info = self.runner.runtime.engine.info
        return f"{self.name} on {info.name} ({info.device})"

    def describe(self) -> dict[str, str]:
        engine, stats = self.runner.runtime.engine, self.runner.cache.stats()
        return {
            "model": self.name,
            **{name: value for name, value in engine.describe().items() if name in _ENGINE_FACTS},
            "context": f"{engine.context_tokens:,} tokens",
            **describe_memory(stats),
        }

    def stream(
        self,
        prompt: Prompt,
        given: GivenParams,
        *,
        choice: int = 0,
        is_cancelled: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> Iterator[Chunk | Completion]:
        return self.runner.stream(
            prompt,
            self.runner.model_params(**given),
            raw=isinstance(prompt, str),
            choice=choice,
            is_cancelled=is_cancelled,
            on_progress=on_progress,
        )

    def draw_tree(self, width: int | None) -> str:
        return self.runner.cache.tree().draw(width)

    def explain(self, messages: list[Message]) -> Mapping[str, Any]:
        return asdict(self.runner.cache.explain(messages))

    def change_model(self, name: str, progress: Progress) -> None:
        if name == self.name:
            return
        other = LocalBackend.open(name, self._settings, progress)
        self.runner.close()
        self.runner, self._model, self.load_s = other.runner, name, other.load_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()
