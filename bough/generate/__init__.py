"""From token ids to an answer: prefill, decode, stop, text. Plain Python, no tensors."""
