"""The interactive chat of `bough run`."""
