"""Bough."""
