"""The composition root: picks the engine, loads the model, and wires cache and generation together."""

from bough.runner.loading import (
    Advise,
    describe_kernels,
    find_advice,
    find_model,
    gguf_support,
    load,
    load_files,
    load_shape,
    make_engine,
    make_shape,
)
from bough.runner.runner import Runner

__all__ = [
    "Advise",
    "Runner",
    "describe_kernels",
    "find_advice",
    "find_model",
    "gguf_support",
    "load",
    "load_files",
    "load_shape",
    "make_engine",
    "make_shape",
]
