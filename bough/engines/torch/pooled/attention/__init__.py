"""Attention over the slots of a pool: buffers for plans, Triton kernels, the same in plain torch."""
