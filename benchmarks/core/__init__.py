"""`python -m benchmarks core`: the tree and the host alone, without a model."""
