"""Serving: from what a client asks for, whichever API it came by, to the answer of a loaded model."""
