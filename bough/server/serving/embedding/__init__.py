"""Embeddings of texts, and scores of documents, for all APIs."""
