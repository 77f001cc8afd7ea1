"""Bough's own API: the cache over HTTP, and health."""
