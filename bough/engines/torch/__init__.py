"""The compute contract on PyTorch and transformers: `TorchEngine.load(folder, settings)`."""

from bough.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
