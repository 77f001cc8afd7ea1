"""What the real scheduler, cache and engine reach on a device, with a model of random weights."""
