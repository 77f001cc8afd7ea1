"""Replaying a trace: the real cache over an engine that only counts, policies side by side."""
