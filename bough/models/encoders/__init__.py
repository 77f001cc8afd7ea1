"""Encoders: which models they are, what their files say of pooling, and how they tokenize."""
