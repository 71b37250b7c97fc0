"""The head of an explanation: what matters, in a few sentences."""

from __future__ import annotations

from kvbaton.explain.groups import alike_refusals
from kvbaton.explain.result import Explanation, Side
from kvbaton.explain.words import show_bytes, show_count


def sentences(explanation: Explanation) -> list[str]:
    """What moves, between whom, which way, and what is refused."""
    told = [
        f"{explanation.source.model}: a request of {show_count(explanation.tokens, 'token')}"
        + (f", {explanation.prefix:,} of which the destination has already" if explanation.prefix else "")
        + f", in {explanation.pages} pages",
        f"from {_side(explanation.source)} to {_side(explanation.destination)}: {show_bytes(explanation.nbytes)} "
        f"({explanation.nbytes:,} bytes) in {show_count(explanation.pieces, 'piece')}, "
        f"{show_count(len(explanation.pairs), 'pair')} of ranks",
    ]
    if explanation.destination.model != explanation.source.model:
        told.append(f"the destination serves {explanation.destination.model}")
    told += _transport(explanation)
    if explanation.pairs:
        idle = sum(not rank.nbytes for rank in explanation.source.ranks)
        stripes = "striped" if explanation.striped else "not striped"
        told.append(
            f"balance of the sources ({stripes}): the busiest sends {explanation.source.balance:g} times the mean"
            + (f"; {idle} of {len(explanation.source.ranks)} send nothing" if idle else "")
        )
    if explanation.planner is not None:
        planner = explanation.planner
        told.append(
            f"the planner took {planner.assign:g} ms to assign, {planner.compile:g} ms to compile, "
            f"{planner.bind:g} ms to bind, for all pairs"
        )
    if explanation.refused:
        destinations = len({refusal.destination for refusal in explanation.refusals})
        reasons = len(alike_refusals(explanation.refusals))
        told.append(
            f"REFUSED at {destinations} of {show_count(len(explanation.destination.ranks), 'destination')}, "
            f"for {show_count(reasons, 'reason')}"
        )
    return told


def _side(side: Side) -> str:
    replicas = f", one of {side.replicas} replicas" if side.replicas > 1 else ""
    return f"{side.title} ({show_count(len(side.ranks), 'rank')}{replicas})"


def _transport(explanation: Explanation) -> list[str]:
    transport = explanation.transport
    if not transport.name:
        return []
    absent = "" if transport.available else " (not in this release: what its kind would do)"
    ways = {pair.executor: pair.why for pair in explanation.pairs}
    return [f"transport {transport.name}{absent}: {way}, {why}" for way, why in ways.items()]
