"""The APIs: each a thin translation between its wire format and what the server serves."""
