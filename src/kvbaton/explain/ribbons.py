"""An explanation as a picture: source ranks left, destination ranks right, ribbons as wide as the bytes between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbaton.explain.drawing import COLOURS, legend, line, picture, rectangle, ribbon, text
from kvbaton.explain.groups import pair_name
from kvbaton.explain.result import Explanation, Flow, Pair, RankInfo
from kvbaton.explain.sentences import sentences
from kvbaton.explain.words import show_bytes, show_count, show_runs

WIDTH = 960.0
CARD = 190.0
MARGIN = 20.0
GAP = 8.0
LEAST_CARD = 24.0
LEAST_RIBBON = 0.75
FLOW_HEIGHT = 260.0
TWO_LINES = 40.0


def draw(explanation: Explanation) -> str:
    """The picture as the text of an SVG file; the same explanation gives the same text."""
    names = [component.name for component in explanation.components]
    kinds = {name: f"c{index % len(COLOURS)}" for index, name in enumerate(names)}
    told = sentences(explanation)
    head = f"{explanation.source.title} → {explanation.destination.title}"
    body = [text(MARGIN, 30, head, "bold")]
    body += [text(MARGIN, 50 + 16 * index, _short(words), "faint") for index, words in enumerate(told[:2])]
    entries = [
        (
            f"flow {kinds[entry.name]}",
            f"{entry.name}: {show_bytes(entry.nbytes)}, {show_count(entry.runs.pieces, 'piece')}",
        )
        for entry in explanation.components
    ]
    if explanation.refused:
        entries.append(("card refused", "refused"))
    listed, used = legend(entries, MARGIN, 80, WIDTH - 2 * MARGIN)
    body += listed
    top = 80 + used + 8
    heights = _ribbon_heights(explanation)
    columns = [
        _stack(explanation.source.ranks, heights, 0),
        _stack(explanation.destination.ranks, heights, 1),
    ]
    height = max(sum(column) + GAP * (len(column) - 1) for column in columns)
    tops = [_tops(column, top, height) for column in columns]
    body += _ribbons(explanation, heights, kinds, tops, columns)
    body += _refused(explanation, tops, columns)
    refused = {refusal.destination for refusal in explanation.refusals}
    body += _cards(explanation.source.ranks, MARGIN, tops[0], columns[0], set(), "sends")
    body += _cards(explanation.destination.ranks, WIDTH - MARGIN - CARD, tops[1], columns[1], refused, "receives")
    return picture("ribbons", WIDTH, top + height + MARGIN, head, ". ".join(told) + ".", body)


def _short(words: str, most: int = 135) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


Key = tuple[int, int, str]


def _flows(explanation: Explanation) -> Iterable[tuple[Key, Pair, Flow]]:
    for pair in explanation.pairs:
        for flow in pair.flows:
            if flow.nbytes:
                yield (pair.source, pair.destination, flow.component), pair, flow


def _ribbon_heights(explanation: Explanation) -> dict[Key, float]:
    """Heights by source, destination and component: in proportion to bytes, but never too thin to see."""
    ranks = max(len(explanation.source.ranks), len(explanation.destination.ranks))
    scale = max(FLOW_HEIGHT, ranks * LEAST_CARD) / max(explanation.nbytes, 1)
    return {key: max(flow.nbytes * scale, LEAST_RIBBON) for key, _, flow in _flows(explanation)}


def _stack(ranks: Sequence[RankInfo], heights: dict[Key, float], end: int) -> list[float]:
    """Heights of the cards of one side."""
    totals = [0.0] * len(ranks)
    for key, height in heights.items():
        totals[int(key[end])] += height
    return [max(total, LEAST_CARD) for total in totals]


def _tops(column: Sequence[float], top: float, height: float) -> list[float]:
    at = top + (height - sum(column) - GAP * (len(column) - 1)) / 2
    found = []
    for card in column:
        found.append(at)
        at += card + GAP
    return found


def _ribbons(
    explanation: Explanation,
    heights: dict[Key, float],
    kinds: dict[str, str],
    tops: Sequence[Sequence[float]],
    columns: Sequence[Sequence[float]],
) -> list[str]:
    order = {name: index for index, name in enumerate(kinds)}
    starts: list[dict[Key, float]] = []
    for end in (0, 1):
        used = [0.0] * len(columns[end])
        for key, height in heights.items():
            used[int(key[end])] += height
        # Ribbons sit in the middle of a card that is higher than they are.
        at = [card + (space - filled) / 2 for card, space, filled in zip(tops[end], columns[end], used, strict=True)]
        placed: dict[Key, float] = {}
        for key in sorted(heights, key=lambda key: (key[end], key[1 - end], order[key[2]])):
            placed[key] = at[int(key[end])]
            at[int(key[end])] += heights[key]
        starts.append(placed)
    body = []
    for key, pair, flow in _flows(explanation):
        title = (
            f"{pair_name(explanation, pair.source, pair.destination)}: {flow.component}, {show_bytes(flow.nbytes)} in "
            f"{show_count(flow.runs.pieces, 'piece')} of {show_runs(flow.runs)}, {pair.executor}"
        )
        left, right = (MARGIN + CARD, starts[0][key]), (WIDTH - MARGIN - CARD, starts[1][key])
        body.append(ribbon(left, right, heights[key], f"flow {kinds[flow.component]}", title))
    return body


def _refused(
    explanation: Explanation, tops: Sequence[Sequence[float]], columns: Sequence[Sequence[float]]
) -> list[str]:
    body = []
    for refusal in explanation.refusals:
        if refusal.source is None:
            continue
        ends = [tops[end][at] + columns[end][at] / 2 for end, at in ((0, refusal.source), (1, refusal.destination))]
        name = pair_name(explanation, refusal.source, refusal.destination)
        title = f"{name} is refused. {refusal.error}: {refusal.reason}"
        body.append(line((MARGIN + CARD, ends[0]), (WIDTH - MARGIN - CARD, ends[1]), "refused", title))
    return body


def _cards(
    ranks: Sequence[RankInfo],
    x: float,
    tops: Sequence[float],
    heights: Sequence[float],
    refused: set[int],
    verb: str,
) -> list[str]:
    body = []
    for rank, top, height in zip(ranks, tops, heights, strict=True):
        kind = "card refused" if rank.number in refused else "card" if rank.nbytes else "card idle"
        amount = show_bytes(rank.nbytes) if rank.nbytes else "refused" if rank.number in refused else "nothing"
        title = (
            f"{rank.coords}: {verb} {amount} in {show_count(rank.pieces, 'piece')}; has {', '.join(rank.components)}"
        )
        body.append(rectangle(x, top, CARD, height, kind, title))
        middle = top + height / 2
        if height >= TWO_LINES:
            body.append(text(x + 10, middle - 3, rank.label, "bold"))
            body.append(text(x + 10, middle + 13, f"{verb} {amount}", "faint"))
        else:
            body.append(text(x + 10, middle + 4, rank.label, "bold"))
            body.append(text(x + CARD - 10, middle + 4, amount, "faint", "end"))
    return body
