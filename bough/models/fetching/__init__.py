"""Fetches models: downloads, the Hugging Face hub, the Python package index."""
