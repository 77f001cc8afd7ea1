"""Many requests at once in the library, against clients of a server; and many forks of one chat."""
