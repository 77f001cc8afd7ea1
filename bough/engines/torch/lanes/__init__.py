"""A lane of the torch engine: its buffers, the cache layers over them, and the pages that leave it."""
