"""A model whose engines run in other processes: replicas, each with a tree of its own."""
