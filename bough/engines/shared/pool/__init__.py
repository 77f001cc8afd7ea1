"""Rows of all lanes in the slots of one pool, without a tensor library: which slots are used, and plans for attention."""
