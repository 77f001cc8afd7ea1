"""The compute contract on MLX and mlx-lm: `MlxEngine.load(folder, settings)`."""

from bough.mlx_engine.engine import MlxEngine

__all__ = ["MlxEngine"]
