"""Replays over several replicas: which one to send a request to, and what comes of it."""
