"""`python -m benchmarks quality`: what other weights do to the answers."""
