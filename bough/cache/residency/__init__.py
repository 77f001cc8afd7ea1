"""Residency: which tier holds which page, how many bytes each tier has, and what is evicted."""
