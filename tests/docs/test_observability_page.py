"""docs/observability.md is true: its code runs, and its tables have every metric, field and event."""

import asyncio
import inspect
import re

import httpx
import pytest
import yaml
from code_blocks import DOCS, blocks, run_blocks
from prometheus_client import CollectorRegistry

from kvbaton.observe import Metrics, Observer, environment, log
from kvbaton.observe.base import Figures, ObservedRank, ObservedRoom, PartRecord, PeerRecord
from kvbaton.observe.log import failure
from kvbaton.registry import RegistryTable
from kvbaton.registry.server import make_app

PAGE = DOCS / "observability.md"
TEXT = PAGE.read_text()
ROW = re.compile(r"^\| (`kvbaton_\w+`) \| (\w+) \|([^|]*)\|", re.MULTILINE)


def told():
    """Name: (type, labels), as the page has them."""
    return {name.strip("`"): (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in ROW.findall(TEXT)}


def test_the_code_runs_and_prints_what_the_page_says():
    listed = blocks(TEXT)
    assert len(listed) == 1
    run_blocks(PAGE, listed)


def test_every_metric_of_a_manager_is_there_with_its_labels():
    registry = CollectorRegistry()
    Metrics(registry)
    made = {}
    for collector in registry._collector_to_names:
        for family in collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            made[name] = (family.type, list(labels))
    page = {name: value for name, value in told().items() if not name.startswith("kvbaton_registry")}
    assert page == made


def test_every_metric_of_a_registry_is_there():
    async def ask():
        app = make_app(RegistryTable())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://registry") as client:
            return [await client.get("/health"), await client.get("/metrics")][1].text

    shown = re.findall(r"^# TYPE (kvbaton_\w+) (\w+)$", asyncio.run(ask()), re.MULTILINE)
    page = {name: kind for name, (kind, _) in told().items() if name.startswith("kvbaton_registry")}
    assert page == {name: kind for name, kind in shown if not name.endswith("_created")}


def test_alerts_name_metrics_that_there_are():
    (found,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    rules = yaml.safe_load(found)["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) == 7
    for rule in rules:
        for name, labels in re.findall(r"(kvbaton_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            base = name.removesuffix("_bucket")
            assert base in told(), name
            assert set(re.findall(r"(\w+)[!=~]+\"", labels)) <= set(told()[base][1])


def test_every_field_of_the_line_is_there():
    rank = ObservedRank("prefill", "i", "tp0/1", frozenset({"kv"}), 0.0, Figures)
    peer = PeerRecord("j", "tp0/1", "shm")
    part = PartRecord(peer, 0, 1, 8, 0, True, False, False, 1, {}, {"kv": 4})
    room = ObservedRoom(rank, 7, 0.0, ended=1.0, reason="why", parts=(part,), held=True, trace="00-a")
    fields = failure(room)
    start = TEXT.index("| field | what it is |")
    table = TEXT[start : TEXT.index("\n\n", start)]
    firsts = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert firsts == set(fields) | {"held_seconds"}
    for name in fields["parts"][0]:
        assert f"`{name}`" in table


def test_every_event_is_there():
    start = TEXT.index("| method | when |")
    table = TEXT[start : TEXT.index("\n\n", start)]
    listed = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    events = [name for name, value in vars(Observer).items() if inspect.isfunction(value)]
    assert sorted(listed) == sorted(events)


@pytest.mark.parametrize("name", ["kvbaton.rooms", "KVBATON_TRACE"])
def test_names_are_those_of_the_code(name):
    assert name in (log.logger.name, environment.TRACE_VARIABLE)
    assert name in TEXT
