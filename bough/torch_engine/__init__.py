"""The compute contract on PyTorch and transformers: `TorchEngine.load(folder, settings)`."""

from bough.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
