"""Rows of all lanes in the slots of one pool, without a tensor library: which slot holds what, and what a step reads."""
