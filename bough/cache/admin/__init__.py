"""Looking at the cache and changing it from outside: views, figures, kept prefixes, trees on disk, archives."""
