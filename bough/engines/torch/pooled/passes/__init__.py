"""Forward passes over static buffers: steps and runs, compiled layers, CUDA graphs."""
