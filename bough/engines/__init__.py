"""Engines: the contract that each of them keeps, the choice between them, and what they share."""
