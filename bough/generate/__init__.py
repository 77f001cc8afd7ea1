"""Generation: prefill, decode, stop strings and text, for one request or many. Plain Python, no tensors."""
