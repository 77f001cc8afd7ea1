"""Kernels for CPUs: weights stay in the blocks of their file, and a step is one call."""
