"""From files to an mlx-lm model: configurations, GGUF files, and classes that mlx-lm lacks."""
