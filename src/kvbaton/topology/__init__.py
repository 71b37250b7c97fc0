"""Deployments by description: a file that says how a model is served, and the layouts of its ranks."""

from kvbaton.topology.presets import PRESETS
from kvbaton.topology.ranks import Topology, lay_out
from kvbaton.topology.read import load_topology, read_topology

__all__ = ["PRESETS", "Topology", "lay_out", "load_topology", "read_topology"]
