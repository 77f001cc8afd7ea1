"""Bough runs language models and remembers: conversations share the state of their common prefixes in one tree.

with bough.load() as runner:
    answer = runner.generate([{"role": "user", "content": "What is the capital of France?"}])
    print(answer.text, answer.usage.cached_tokens)
"""

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
from bough.runner import Runner, load
from bough.types import Chunk, Completion, SamplingParams, Timings, Usage

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
