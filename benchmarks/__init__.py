"""Benchmarks of Bough's parts, run from a clone: `python -m benchmarks NAME`. They are no part of the package.

What a user runs to judge a machine or a choice is `bough bench`. Nothing in `bough` imports this folder.
"""
