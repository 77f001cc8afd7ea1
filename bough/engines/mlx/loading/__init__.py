"""From files to an mlx-lm model: configurations, weights and GGUF files."""
