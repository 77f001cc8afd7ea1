"""The compute contract on PyTorch and transformers: `TorchEngine.load(folder, settings)`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]


def __getattr__(name: str) -> Any:
    """Import the engine on first use, so that the library of the CPU kernels is found without PyTorch."""
    if name == "TorchEngine":
        import transformers  # noqa: F401  # before torch, whose library another thread may be loading

        from bough.engines.torch.engine import TorchEngine

        return TorchEngine
    raise AttributeError(f"module 'bough.engines.torch' has no attribute {name!r}")
