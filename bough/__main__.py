"""`python -m bough` is the command `bough`."""

from bough.cli.main import main

main()
