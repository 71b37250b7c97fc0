"""Deterministic simulation: the real logic of managers on a simulated network, clock and memory, with seeded faults."""
