"""Bough and other servers with the same workloads, in turns in one run."""
