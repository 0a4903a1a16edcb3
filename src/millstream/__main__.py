"""`python -m millstream` is the `millstream` command."""

from millstream.cli import main

main()
