"""`python -m gape.cli`."""

from gape.cli import main

main()
