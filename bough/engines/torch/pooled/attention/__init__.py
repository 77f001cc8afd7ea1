"""Attention over the slots of a pool, as transformers calls it: plans, Triton kernels, the same in plain torch."""
