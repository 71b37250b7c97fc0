"""``python -m kvbaton``: the command line."""

from kvbaton.cli.main import main

main()
