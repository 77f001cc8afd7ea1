"""Looking at the cache and changing it from outside: views, figures, pins, trees on disk, archives."""
