"""Encoders on PyTorch and transformers: vectors of texts, and scores of pairs of texts."""

from bough.engines.torch.encoders.engine import TorchEncoder

__all__ = ["TorchEncoder"]
