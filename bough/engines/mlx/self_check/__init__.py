"""The MLX engine's side of the self-check: its groups, a small copy of the model, what a verdict depends on."""
