"""Replays recorded requests against the real cache, with an engine that only counts, to compare eviction policies."""
