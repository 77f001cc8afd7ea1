"""What the machine and the operating system offer: memory, disk space, threads."""
