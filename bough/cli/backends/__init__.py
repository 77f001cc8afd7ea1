"""Where `bough run` gets its answers from: a model in this process, or one in a running server."""
