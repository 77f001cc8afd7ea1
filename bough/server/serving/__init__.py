"""Serving: from an ask, whichever API it came by, to the answer of a loaded model. Nothing here knows HTTP."""
