"""What the logic of both sides may touch: the world around it only through the interfaces that are passed in."""

import ast
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvbaton
from kvbaton.runtime.control import ControlPlane
from kvbaton.runtime.settings import Settings
from kvbaton.runtime.threads import Threads

PACKAGE = Path(kvbaton.__file__).parent
OUTSIDE = {"zmq", "socket", "asyncio", "httpx", "select", "ctypes"}
LOGIC = ("prefill", "decode")


def imported(path):
    """The modules that a file imports by name, whenever it runs."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def reached(names):
    """What these modules of the runtime import, through others of the runtime."""
    seen, left = set(), [f"kvbaton.runtime.{name}" for name in names]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if module.startswith("kvbaton.runtime."):
            left += imported(PACKAGE / "runtime" / f"{module.rpartition('.')[2]}.py")
    return seen


def test_the_logic_of_both_sides_imports_no_sockets_and_starts_no_threads():
    found = reached(LOGIC)
    assert "kvbaton.runtime.sources" in found
    assert not {module.partition(".")[0] for module in found} & OUTSIDE
    assert not found & {"kvbaton.runtime.control", "kvbaton.runtime.threads", "kvbaton.runtime.manager"}


def test_the_real_ones_are_seen_by_the_same_search():
    assert "zmq" in reached(["control"])
    assert "threading" in reached(["threads"])


def test_a_deadline_is_counted_by_the_clock_that_is_passed_in():
    from kvbaton.layout import RankLayout
    from kvbaton.runtime.context import Context
    from kvbaton.runtime.outbox import Outbox
    from kvbaton.runtime.prefill import PrefillSide

    plane = ControlPlane("clock", Settings(), bind=None)
    times = [100.0]
    with ThreadPoolExecutor(1) as executor:
        context = Context(
            instance="one",
            model="",
            layout=RankLayout(()),
            regions=(),
            transports={},
            left_out={},
            control=plane,
            outbox=Outbox(plane.send),
            settings=Settings(),
            executor=executor,
            threads=Threads(),
            clock=lambda: times[0],
        )
        side = PrefillSide(context)
        assert {field.name for field in dataclasses.fields(context)} > {"clock", "threads", "executor", "control"}
        side.perform(side.core.open(1, context.now()))
        assert side.on_turn(times[0]) == 100.0 + Settings().deadlines.offer_wait
        times[0] = 1e9
        side.on_turn(context.now())
        assert "0 decode ranks have offered" in side.core.reason(1)
    plane.close()
    assert time.monotonic() < 1e9
