"""`python -m freerun`."""

from freerun.cli import main

main()
