"""The command line, ``kvbaton``."""
