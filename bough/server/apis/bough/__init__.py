"""Bough's own API: the cache, health and metrics."""
