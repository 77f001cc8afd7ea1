"""From what a client asks, by the library or an API, to what is to be computed: the tokens and their parameters."""
