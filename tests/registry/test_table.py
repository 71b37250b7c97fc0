from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import RegistryError
from kvbaton.layout import SLOT
from kvbaton.layout.nouns import Axis, Component, Coords, Ownership, RankLayout, Tensor
from kvbaton.registry import Limits, Registration, RegistryRefused, RegistryTable, UnknownDeployment

AXIS = Axis("head", 4, 64, ((0, 2),))
TENSOR = Tensor("key", 0, 0, 0, 8, 512, "bfloat16", (AXIS,))


def rank(
    instance: str = "i0",
    *,
    coords: Coords = Coords(),  # noqa: B008 - frozen
    deployment: str = "default",
    model: str = "m",
    tensor: Tensor = TENSOR,
    endpoint: str = "tcp://127.0.0.1:7000",
    owned: Ownership = Ownership(),  # noqa: B008 - frozen
) -> Registration:
    layout = RankLayout((Component("state", SLOT, (tensor,)),), coords, owned)
    return Registration(instance, endpoint, layout, model, deployment)


def test_complete_topology_is_ordered_by_dp_pp_cp_tp() -> None:
    table = RegistryTable()
    places = list(itertools.product(range(2), range(2), range(2), range(3)))
    for dp, pp, cp, tp in reversed(places):
        coords = Coords(tp=(tp, 3), pp=(pp, 2), cp=(cp, 2), dp=(dp, 2))
        table.register(rank(f"i{dp}{pp}{cp}{tp}", coords=coords), 0.0)
    assert [each.instance for each in table.topology("default", 0.0).ranks] == [
        f"i{d}{p}{c}{t}" for d, p, c, t in places
    ]


def test_missing_ranks_are_named() -> None:
    table = RegistryTable()
    table.register(rank("a", coords=Coords(tp=(1, 4))), 0.0)
    table.register(rank("b", coords=Coords(tp=(3, 4))), 0.0)
    with pytest.raises(RegistryRefused, match=r"2 of 4 ranks; missing: tp0/4 pp0/1 cp0/1 dp0/1; tp2/4") as caught:
        table.topology("default", 0.0)
    assert "tp1/4" not in str(caught.value)


def test_many_missing_ranks_are_counted_without_walking_the_grid() -> None:
    table = RegistryTable()
    huge = 1 << 16
    table.register(rank(coords=Coords(tp=(0, huge), pp=(0, huge), cp=(0, huge), dp=(0, huge))), 0.0)
    with pytest.raises(RegistryRefused, match=f"and {huge**4 - 5} more"):
        table.topology("default", 0.0)


def test_unknown_deployment_says_which_are_known() -> None:
    table = RegistryTable()
    table.register(rank(deployment="blue"), 0.0)
    with pytest.raises(UnknownDeployment, match=r"'green'.*blue"):
        table.topology("green", 0.0)


@pytest.mark.parametrize(
    ("now", "alive"),
    [(0.0, True), (10.0, True), (10.001, False), (1e9, False)],
)
def test_a_silent_rank_is_forgotten_after_its_ttl(now: float, alive: bool) -> None:
    table = RegistryTable(ttl=10.0)
    table.register(rank(), 0.0)
    assert table.heartbeat("i0", now) is alive
    assert len(table) == int(alive)


def test_heartbeats_keep_a_rank_alive_and_only_that_one() -> None:
    table = RegistryTable(ttl=10.0)
    table.register(rank("a", coords=Coords(tp=(0, 2))), 0.0)
    table.register(rank("b", coords=Coords(tp=(1, 2))), 0.0)
    for now in range(3, 31, 3):
        assert table.heartbeat("a", float(now))
    with pytest.raises(RegistryRefused, match="missing: tp1/2"):
        table.topology("default", 30.0)


def test_a_replaced_rank_is_noticed() -> None:
    table = RegistryTable()
    table.register(rank("old", endpoint="tcp://a:1"), 0.0)
    before = table.topology("default", 0.0)
    table.register(rank("new", endpoint="tcp://a:2"), 1.0)
    after = table.topology("default", 1.0)
    assert [each.instance for each in after.ranks] == ["new"]
    assert after.generation > before.generation
    assert not table.heartbeat("old", 1.0)
    assert not table.remove("old", 1.0)
    assert table.heartbeat("new", 1.0)


def test_registering_again_renews_and_changes_nothing_else() -> None:
    table = RegistryTable(ttl=10.0)
    table.register(rank(), 0.0)
    generation = table.topology("default", 0.0).generation
    table.register(rank(), 9.0)
    assert table.topology("default", 18.0).generation == generation


def test_generation_grows_over_the_life_of_a_deployment() -> None:
    table = RegistryTable(ttl=10.0, generation=100)
    seen = [table.register(rank("a"), 0.0)]
    table.remove("a", 0.0)
    seen.append(table.register(rank("b"), 0.0))
    seen.append(table.register(rank("c"), 20.0))
    assert seen == sorted(set(seen))
    assert seen[0] > 100


def test_deployments_are_apart() -> None:
    table = RegistryTable()
    table.register(rank("a", deployment="blue", model="x"), 0.0)
    table.register(rank("b", deployment="green", model="y", coords=Coords(tp=(0, 2))), 0.0)
    assert [each.instance for each in table.topology("blue", 0.0).ranks] == ["a"]
    table.remove("a", 0.0)
    assert table.deployments == ("green",)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (rank("b", coords=Coords(tp=(1, 4))), r"tp1/4.*tp size 4.*tp0/2.*says 2"),
        (rank("b", coords=Coords(tp=(1, 2), pp=(0, 3))), r"pp size 3.*says 1"),
        (rank("b", coords=Coords(tp=(1, 2)), model="other"), r"'other'.*'m'"),
        (rank("a", coords=Coords(tp=(1, 2))), r"instance a asks for tp1/2.*registered as tp0/2"),
        (rank("a", coords=Coords(tp=(0, 2)), deployment="else"), r"instance a asks"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(second: Registration, message: str) -> None:
    table = RegistryTable()
    table.register(rank("a", coords=Coords(tp=(0, 2))), 0.0)
    with pytest.raises(RegistryRefused, match=message):
        table.register(second, 0.0)
    assert table.heartbeat("a", 0.0)
    assert len(table) == 1


def test_the_only_rank_may_be_replaced_by_one_of_another_size() -> None:
    table = RegistryTable()
    table.register(rank("a", coords=Coords(tp=(0, 2))), 0.0)
    table.register(rank("b", coords=Coords(tp=(0, 1)), model="other"), 0.0)
    assert [each.instance for each in table.topology("default", 0.0).ranks] == ["b"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rank(coords=Coords(tp=(2, 2))), "coords tp: rank is 2"),
        (rank(coords=Coords(cp=(-1, 2))), "coords cp: rank is -1"),
        (rank(coords=Coords(dp=(0, 0))), "coords dp: size is 0"),
        (rank(coords=Coords(pp=(0, 1 << 40))), "coords pp: size is"),
        (rank(""), "instance ''"),
        (rank("a/b"), "instance 'a/b'"),
        (rank("x" * 200), "instance"),
        (rank(deployment="no spaces"), "deployment"),
        (rank(endpoint="nowhere"), "endpoint 'nowhere'"),
        (rank(model="x" * 5000), "5000 characters"),
        (rank(tensor=Tensor("key", 0, 0, -1, 8, 512, "bfloat16", (AXIS,))), "offset is -1"),
        (rank(tensor=Tensor("key", 0, 0, 0, -8, 512, "bfloat16", (AXIS,))), "rows is -8"),
        (rank(tensor=Tensor("key", -2, 0, 0, 8, 512, "bfloat16", (AXIS,))), "layer is -2"),
        (rank(tensor=Tensor("key", 0, 0, 0, 8, 1 << 70, "bfloat16", (AXIS,))), "row_stride is"),
        (rank(tensor=Tensor("key", 0, 0, 0, 8, 512, "complex", (AXIS,))), "dtype 'complex'"),
        (rank(tensor=Tensor("", 0, 0, 0, 8, 512, "int8", (AXIS,))), "role"),
        (
            rank(tensor=Tensor("key", 0, 0, 0, 8, 512, "int8", (Axis("head", 4, 64, ((3, 2),)),))),
            r"axis head: span 3\.\.5",
        ),
        (rank(tensor=Tensor("key", 0, 0, 0, 8, 512, "int8", (Axis("head", 4, -64, ()),))), "stride is -64"),
        (rank(owned=Ownership(1, 0, 0)), "modulus is 0"),
        (rank(owned=Ownership(1, 2, 2)), "remainder is 2"),
    ],
)
def test_what_no_rank_can_mean_is_refused(bad: Registration, message: str) -> None:
    table = RegistryTable()
    with pytest.raises(RegistryRefused, match=message):
        table.register(bad, 0.0)
    assert len(table) == 0
    assert table.deployments == ()


def test_component_named_twice_is_refused() -> None:
    layout = RankLayout((Component("kv", SLOT, ()), Component("kv", SLOT, ())))
    with pytest.raises(RegistryRefused, match="component kv: is listed twice"):
        RegistryTable().register(Registration("a", "tcp://a:1", layout, "m"), 0.0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(ranks=2), "2 ranks already"),
        (Limits(deployments=1), "1 deployments already"),
        (Limits(registration_bytes=100), "more than 100"),
        (Limits(total_bytes=600), "more than 600"),
    ],
)
def test_the_table_is_bounded(limits: Limits, message: str) -> None:
    table = RegistryTable(limits=limits)
    refusals = []
    for index in range(4):
        try:
            table.register(rank(f"i{index}", deployment=f"d{index // 2}", coords=Coords(tp=(index % 2, 2))), 0.0)
        except RegistryRefused as error:
            refusals.append(str(error))
    assert refusals
    assert all(message in refusal for refusal in refusals)
    assert len(table) == 4 - len(refusals)


def test_a_full_table_still_renews_and_replaces() -> None:
    table = RegistryTable(limits=Limits(ranks=1, deployments=1))
    table.register(rank("a"), 0.0)
    table.register(rank("a"), 1.0)
    table.register(rank("b"), 1.0)
    assert table.heartbeat("b", 1.0)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["register", "heartbeat", "remove", "topology", "wait"]),
        st.integers(0, 4),
        st.integers(0, 1),
        st.sampled_from(["x", "y"]),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_the_table_agrees_with_a_simple_model(operations: list[tuple[str, int, int, str]]) -> None:
    table = RegistryTable(ttl=5.0)
    alive: dict[tuple[str, int], tuple[str, float]] = {}
    now = 0.0
    generations: dict[str, list[int]] = {"x": [0], "y": [0]}
    for operation, number, tp, deployment in operations:
        alive = {place: (name, seen) for place, (name, seen) in alive.items() if now - seen <= 5.0}
        instance = f"i{number}"
        place = next((place for place, (name, _) in alive.items() if name == instance), None)
        if operation == "wait":
            now += number
        elif operation == "register":
            if place in (None, (deployment, tp)):
                generations[deployment].append(
                    table.register(rank(instance, coords=Coords(tp=(tp, 2)), deployment=deployment), now)
                )
                alive[(deployment, tp)] = (instance, now)
            else:
                with pytest.raises(RegistryError):
                    table.register(rank(instance, coords=Coords(tp=(tp, 2)), deployment=deployment), now)
        elif operation == "heartbeat":
            assert table.heartbeat(instance, now) == (place is not None)
            if place is not None:
                alive[place] = (instance, now)
        elif operation == "remove":
            assert table.remove(instance, now) == (place is not None)
            if place is not None:
                del alive[place]
        elif all((deployment, each) in alive for each in range(2)):
            names = [each.instance for each in table.topology(deployment, now).ranks]
            assert names == [alive[(deployment, each)][0] for each in range(2)]
        else:
            with pytest.raises(RegistryError):
                table.topology(deployment, now)
    assert all(seen == sorted(seen) for seen in generations.values())
    table.expire(now + 100.0)
    assert len(table) == 0
    assert table.deployments == ()


def test_a_table_that_replaces_another_says_for_how_long_ranks_may_return() -> None:
    table = RegistryTable(settled=10.0)
    with pytest.raises(UnknownDeployment, match=r"for 7\.5 s more ranks may return") as unknown:
        table.topology("default", 2.5)
    assert unknown.value.returning_seconds == 7.5
    with pytest.raises(UnknownDeployment) as unknown:
        table.find_rooms("default", [1], 4.0)
    assert unknown.value.returning_seconds == 6.0
    table.register(rank("a", coords=Coords(tp=(0, 2))), 4.0)
    with pytest.raises(RegistryRefused, match="missing: tp1/2") as missing:
        table.topology("default", 9.0)
    assert missing.value.returning_seconds == 1.0
    with pytest.raises(RegistryRefused, match="no data-parallel rank 3") as never:
        table.topology("default", 9.0, 3)
    assert never.value.returning_seconds == 0.0
    with pytest.raises(RegistryRefused, match=r"tp1/2 pp0/1 cp0/1 dp0/1$") as missing:
        table.topology("default", 10.0)
    assert missing.value.returning_seconds == 0.0
