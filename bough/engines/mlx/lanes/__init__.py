"""A lane of the MLX engine: its buffers, the caches over them, and the pages that leave it."""
