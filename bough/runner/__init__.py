"""The composition root: picks the engine, loads the model, and wires cache and generation together."""

from bough.runner.runner import Runner, find_model, gguf_support, load, load_files, load_shape, make_engine

__all__ = ["Runner", "find_model", "gguf_support", "load", "load_files", "load_shape", "make_engine"]
