"""GGUF files: converted to Hugging Face folders, or kept as they are."""
