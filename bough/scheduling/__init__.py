"""Many requests on one engine: who waits, who goes next, and the thread that runs them."""
