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
from bough.types import Chunk, Completion, Message, SamplingParams, Timings, TokenLogprob, ToolCall, Usage

if TYPE_CHECKING:
    from bough.runner import (
        BatchOptions,
        Chat,
        ChatOptions,
        EmbedOptions,
        LoadOptions,
        Model,
        RankedDocument,
        RemoteRunner,
        RequestOptions,
        Runner,
        SamplingOptions,
        connect,
        load,
    )

__all__ = [
    "BatchOptions",
    "BoughError",
    "Chat",
    "ChatOptions",
    "Chunk",
    "Completion",
    "DoesNotFit",
    "DownloadError",
    "EmbedOptions",
    "EngineError",
    "LanesBusy",
    "LoadOptions",
    "Message",
    "Model",
    "ModelError",
    "ModelNotFound",
    "PromptTooLong",
    "RankedDocument",
    "RemoteRunner",
    "RequestError",
    "RequestOptions",
    "Runner",
    "SamplingOptions",
    "SamplingParams",
    "SettingsError",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "UnsupportedModel",
    "Usage",
    "connect",
    "load",
]


_OF_RUNNER = (
    "BatchOptions",
    "Chat",
    "ChatOptions",
    "EmbedOptions",
    "LoadOptions",
    "Model",
    "RankedDocument",
    "RemoteRunner",
    "RequestOptions",
    "Runner",
    "SamplingOptions",
    "connect",
    "load",
)


def __getattr__(name: str) -> Any:
    """Import the runner on first use, so that `import bough.cache.tree` loads the tree alone."""
    if name in _OF_RUNNER:
        from bough import runner

        return getattr(runner, name)
    if name == "Ranked":  # its name in the first previews
        return __getattr__("RankedDocument")
    raise AttributeError(f"module 'bough' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
