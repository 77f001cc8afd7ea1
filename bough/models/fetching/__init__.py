"""From a name to files on this machine: downloads, the hub, the package index."""
