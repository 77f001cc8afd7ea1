"""The library: a model that is loaded, conversations with it, and many requests at a time."""

from bough.runner.chat import Chat
from bough.runner.loading import load
from bough.runner.options import BatchOptions, ChatOptions, EmbedOptions, LoadOptions, RequestOptions, SamplingOptions
from bough.runner.runner import Runner
from bough.runtime.encoding import Ranked

__all__ = [
    "BatchOptions",
    "Chat",
    "ChatOptions",
    "EmbedOptions",
    "LoadOptions",
    "Ranked",
    "RequestOptions",
    "Runner",
    "SamplingOptions",
    "load",
]
