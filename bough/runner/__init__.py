"""The composition root: picks the engine, loads the model, and wires cache and generation together."""

from bough.runner.loading import describe_kernels, find_model, gguf_support, load, load_files, load_shape, make_engine
from bough.runner.runner import Runner

__all__ = ["Runner", "describe_kernels", "find_model", "gguf_support", "load", "load_files", "load_shape", "make_engine"]
