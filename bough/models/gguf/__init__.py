"""GGUF files: the small folder beside a file, the rows of it that are weights of the model, or else a conversion."""
