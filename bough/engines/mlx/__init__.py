"""The compute contract on MLX and mlx-lm: `MlxEngine.load(folder, settings)`."""

from bough.engines.mlx.engine import MlxEngine

__all__ = ["MlxEngine"]
