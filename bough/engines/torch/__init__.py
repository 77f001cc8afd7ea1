"""The compute contract on PyTorch and transformers: `TorchEngine.load(folder, settings)`."""

import transformers  # noqa: F401  # before torch, whose library another thread may be loading

from bough.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
