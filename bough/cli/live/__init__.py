"""`bough tree --live`: the tree of a running server, drawn as it changes."""
