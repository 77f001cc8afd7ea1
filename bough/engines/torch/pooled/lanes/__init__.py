"""The memory of a pool, and the lanes and pages in it."""
