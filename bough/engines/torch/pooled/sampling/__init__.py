"""Choosing tokens on the device, without the host in the way."""
