"""A running server as others use it: HTTP, and answers that come in lines. For the command and the library."""
