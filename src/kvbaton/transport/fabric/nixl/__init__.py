"""NIXL as a fabric: the adapter, how its back-end is started, and what processes tell each other."""
