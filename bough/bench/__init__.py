"""Benchmarks: the tree side by side with simpler ways of remembering, as ratios within one run."""
