"""Mooncake as a fabric: the adapter, how its engine is started, and what processes tell each other."""
