"""The command `bough`: its arguments, its output and its exit codes. Only this package and the demo print."""
