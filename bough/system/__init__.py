"""The machine and the operating system: memory, disk space, folders, processes, threads."""
