"""Replays over several replicas: the ways to choose one for a request, and how well each does."""
