"""Encoders: which models they are, how their files pool token states, and how they tokenize."""
