"""`bough launch`: other tools that use a running server."""
