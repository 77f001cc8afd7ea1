"""Bough runs language models and remembers: conversations share the state of their common prefixes in one tree.

with bough.load() as runner:
    answer = runner.generate([{"role": "user", "content": "What is the capital of France?"}])
    print(answer.text, answer.usage.cached_tokens)
"""

from typing import TYPE_CHECKING, Any

from bough.errors import (
    BoughError,
    DoesNotFit,
    DownloadError,
    EngineError,
    LanesBusy,
    ModelError,
    ModelNotFound,
    PromptTooLong,
    RequestError,
    SettingsError,
    UnsupportedModel,
)
from bough.types import Chunk, Completion, SamplingParams, Timings, Usage

if TYPE_CHECKING:
    from bough.runner import Runner, load

__all__ = [
    "BoughError",
    "Chunk",
    "Completion",
    "DoesNotFit",
    "DownloadError",
    "EngineError",
    "LanesBusy",
    "ModelError",
    "ModelNotFound",
    "PromptTooLong",
    "RequestError",
    "Runner",
    "SamplingParams",
    "SettingsError",
    "Timings",
    "UnsupportedModel",
    "Usage",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import the runner on first use, so that `import bough.cache.tree` loads the tree alone."""
    if name in ("Runner", "load"):
        from bough import runner

        return getattr(runner, name)
    raise AttributeError(f"module 'bough' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
