"""Fabrics: libraries that write contiguous bytes into a peer's registered memory. `base` is their contract."""
