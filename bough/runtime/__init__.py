"""A loaded model at work: engine, tokenizer, cache and the engine's thread, wired together."""

from bough.runtime.embedding import EncoderRuntime
from bough.runtime.loading import (
    Advise,
    describe_kernels,
    find_advice,
    find_model,
    gguf_support,
    load_any,
    load_encoder,
    load_runtime,
    load_shape,
    make_engine,
    make_shape,
    weights_bytes,
)
from bough.runtime.runtime import Runtime

__all__ = [
    "Advise",
    "EncoderRuntime",
    "Runtime",
    "describe_kernels",
    "find_advice",
    "find_model",
    "gguf_support",
    "load_any",
    "load_encoder",
    "load_runtime",
    "load_shape",
    "make_engine",
    "make_shape",
    "weights_bytes",
]
