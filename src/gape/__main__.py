"""`python -m gape`, the same as the command `gape`."""

from gape.cli import main

main()
