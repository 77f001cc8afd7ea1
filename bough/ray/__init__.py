"""Bough on Ray Serve: replicas of one model behind today's server. Nothing here is imported without `--ray`."""

from bough.ray.app import build_app

__all__ = ["build_app"]
