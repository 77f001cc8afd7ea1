"""`bough cache`: commands on the trees on disk."""
