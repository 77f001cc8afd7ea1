"""GGUF files: converted to Hugging Face folders, or used as they are."""
