"""Splits an answer into thinking, tool calls and text."""
