"""The library: a model that is loaded, conversations with it, and many requests at a time."""

from bough.runner.chat import Chat
from bough.runner.loaded_runners import load
from bough.runner.model import Model
from bough.runner.options import BatchOptions, ChatOptions, EmbedOptions, LoadOptions, RequestOptions
from bough.runner.remote_runner import RemoteRunner, connect
from bough.runner.runner import Runner
from bough.runtime.embedding import RankedDocument
from bough.sampling_params import SamplingOptions

__all__ = [
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
]
