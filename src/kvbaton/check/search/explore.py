"""Every state of a world, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.check.search.world import State, Step, World


@dataclass(frozen=True)
class Trace:
    """A way from the beginning to a broken promise: which of the steps was taken each time."""

    choices: tuple[int, ...]
    problem: str


@dataclass(frozen=True)
class Result:
    """What a search found."""

    states: int
    transitions: int
    ends: int
    """States that nothing leads out of. In all of them every room has ended and everything was given back."""
    longest: int
    """Events of the longest run: every run ends after so many at the latest."""
    core_states: int
    """States of single processes, real cores in them."""
    core_steps: int
    """How often a real core was asked."""
    trace: Trace | None = None
    """The shortest way to a broken promise; None if all were kept."""


_OPEN = -1
CIRCLE = "the world was in this state before: it may go round for ever"


def search(world: World, progress: Callable[[int, int], None] = lambda states, transitions: None) -> Result:
    """Look at every state of ``world``, depth first, until a promise is broken.

    The graph must have no circle, so that every run ends: one is a broken promise too.
    """
    heights: dict[State, int] = {world.first: _OPEN}
    transitions = ends = 0
    trace = None
    steps = world.steps(world.first)
    # Each entry: a state, its steps, which of them comes next, and the longest way from it so far.
    stack: list[list[object]] = []
    state, at, height = world.first, 0, 0
    while True:
        if at < len(steps):
            step = steps[at]
            at += 1
            transitions += 1
            if step.problem:
                trace = Trace((*_choices(stack), at - 1), step.problem)
                break
            known = heights.get(step.state)
            if known is None:
                stack.append([state, steps, at, height])
                heights[step.state] = _OPEN
                state, steps, at, height = step.state, world.steps(step.state), 0, 0
                if len(heights) % 10_000 == 0:
                    progress(len(heights), transitions)
            elif known == _OPEN:
                trace = Trace((*_choices(stack), at - 1), CIRCLE)
                break
            elif known >= height:
                height = known + 1
            continue
        if not steps:
            ends += 1
            problem = world.problem_at_rest(state)
            if problem:
                trace = Trace(_choices(stack), problem)
                break
        heights[state] = height
        if not stack:
            break
        below = height
        state, steps, at, height = stack.pop()  # type: ignore[assignment]
        height = max(height, below + 1)
    return Result(
        len(heights),
        transitions,
        ends,
        max(heights[world.first], 0),
        sum(len(table) for table in world.tables),
        sum(table.steps for table in world.tables),
        trace,
    )


def _choices(stack: list[list[object]]) -> tuple[int, ...]:
    return tuple(at - 1 for _, _, at, _ in stack)  # type: ignore[operator]


def shortest(world: World) -> Trace | None:
    """The shortest way to a broken promise, breadth first; None if there is none. Circles are not found."""
    parents: dict[State, tuple[State, int] | None] = {world.first: None}
    waiting = deque([world.first])
    while waiting:
        state = waiting.popleft()
        steps = world.steps(state)
        if not steps and (problem := world.problem_at_rest(state)):
            return Trace(_way(parents, state), problem)
        for choice, step in enumerate(steps):
            if step.problem:
                return Trace((*_way(parents, state), choice), step.problem)
            if step.state not in parents:
                parents[step.state] = (state, choice)
                waiting.append(step.state)
    return None


def _way(parents: dict[State, tuple[State, int] | None], state: State) -> tuple[int, ...]:
    choices = []
    while (before := parents[state]) is not None:
        state, choice = before
        choices.append(choice)
    return tuple(reversed(choices))


def replay(world: World, choices: tuple[int, ...]) -> list[Step]:
    """The steps of a trace. Raises `IndexError` for a choice that there is not."""
    steps, state = [], world.first
    for choice in choices:
        step = world.steps(state)[choice]
        steps.append(step)
        state = step.state
    return steps
