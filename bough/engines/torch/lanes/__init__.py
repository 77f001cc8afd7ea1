"""A lane of the torch engine: its buffers, the cache layers over them, its pages, and kernels for steps of many lanes."""
