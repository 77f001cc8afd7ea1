"""Host memory of the torch engine: the pinned pool, and the copies between it and the device."""
