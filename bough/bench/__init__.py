"""Benchmarks of the tree against simpler caching strategies. Each compares figures of one run on one machine."""
