"""A pool of slots that lanes and pages share, and a model that runs on it: by Triton on CUDA, by plain torch elsewhere."""
