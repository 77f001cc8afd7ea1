"""Attention over the slots of a pool: by Triton on CUDA, by plain torch elsewhere."""
