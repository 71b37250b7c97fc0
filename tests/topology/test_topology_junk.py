"""Whatever stands in a file, it is laid out or refused with a typed error of one line."""

import copy
from pathlib import Path

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbaton.errors import KVBatonError
from kvbaton.topology import lay_out, read_topology

FILE = Path(__file__).parents[2] / "examples" / "topologies" / "written-out.yaml"
WHOLE = yaml.safe_load(FILE.read_text())


def paths(value, path=()):
    """The place of every value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from paths(value[key], (*path, key))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
words = st.sampled_from(["0-3", "3::4", "heads", "token", "ring", "last", "all"])
junk = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(paths(WHOLE))), junk, st.booleans())
@example(("components", "local"), "a\nb", True)
@example(("model", "components", "kv"), "a\nb", True)
def test_junk_is_refused_in_one_line(path, value, as_key):
    changed = copy.deepcopy(WHOLE)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if as_key and isinstance(holder, dict) and isinstance(value, str | int):
        holder[value] = holder.pop(path[-1])
    else:
        holder[path[-1]] = value
    reason = "laid out"
    try:
        assert lay_out(read_topology(changed), 100)
    except KVBatonError as error:
        reason = str(error)
    assert reason.isprintable()
