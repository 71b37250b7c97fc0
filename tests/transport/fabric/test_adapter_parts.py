"""What adapters have in common: options that are read, descriptors that travel, tokens that tell processes apart."""

import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import ConfigurationError, TransportError
from kvbaton.transport.fabric import FABRICS, adapter_of, descriptor
from kvbaton.transport.fabric.base import Fabric
from kvbaton.transport.fabric.own_options import OwnOptions
from kvbaton.transport.fabric.scratch import SLOTS, TOKEN_BYTES, Scratch

KNOWN = {"protocol": "rdma or tcp", "lanes": "1 to 8", "devices": "which"}


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told1"):
    host: str
    regions: tuple[int, ...]


class Other(msgspec.Struct, frozen=True, array_like=True, tag="other1"):
    host: str
    regions: tuple[int, ...]


def own(**given):
    return OwnOptions("made-up", given, KNOWN)


def test_options_are_read_or_have_their_defaults():
    assert own(protocol="tcp").one_of("protocol", ("rdma", "tcp"), "rdma") == "tcp"
    assert own().one_of("protocol", ("rdma", "tcp"), "rdma") == "rdma"
    assert [own(lanes="8").number("lanes", 1, 8, 2), own().number("lanes", 1, 8, 2)] == [8, 2]
    assert [own(devices=" a, b,,").names("devices"), own().names("devices")] == [["a", "b"], []]


def test_options_that_are_not_known_are_refused_with_those_that_are():
    with pytest.raises(ConfigurationError, match=r"made-up has no option lane, proto; it has protocol \(rdma or tcp\)"):
        own(lane="1", proto="tcp")
    with pytest.raises(ConfigurationError, match="protocol is 'pigeon'; made-up takes rdma or tcp"):
        own(protocol="pigeon").one_of("protocol", ("rdma", "tcp"), "rdma")


@pytest.mark.parametrize("text", ["0", "9", "-1", "", "many", "²", "1.0"])
def test_numbers_out_of_range_are_refused(text):
    with pytest.raises(ConfigurationError, match=f"lanes is '{text}'; made-up takes 1 to 8"):
        own(lanes=text).number("lanes", 1, 8, 2)


@given(st.text(max_size=20), st.lists(st.integers(0, 1 << 62), max_size=50))
def test_descriptors_come_back(host, regions):
    told = Told(host, tuple(regions))
    assert descriptor.decode(Told, descriptor.encode(told, len(regions)), "x") == told


@given(st.data())
def test_descriptors_that_were_damaged_are_refused(data):
    encoded = bytearray(descriptor.encode(Told("host", (1, 2, 3)), 3))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransportError, match="the descriptor of peer x was damaged"):
        descriptor.decode(Told, bytes(encoded), "x")
    with pytest.raises(TransportError, match="damaged"):
        descriptor.decode(Told, bytes(encoded[:place]), "x")


def with_digest(packed):
    return descriptor._digest(packed) + packed


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"not compressed",
        zlib.compress(b"\xc1"),
        zlib.compress(msgspec.msgpack.encode(("told1", "host", ("no number",)))),
        zlib.compress(bytes(descriptor.MAX_UNPACKED + 1)),
    ],
)
def test_what_is_whole_but_no_descriptor_is_refused(packed):
    with pytest.raises(TransportError, match="the descriptor of peer x cannot be understood"):
        descriptor.decode(Told, with_digest(packed), "x")


def test_the_descriptor_of_another_library_is_refused():
    with pytest.raises(TransportError, match="cannot be understood"):
        descriptor.decode(Told, descriptor.encode(Other("host", (1,)), 1), "x")


def test_a_descriptor_with_too_many_regions_is_refused():
    regions = tuple(np.random.default_rng(1).integers(0, 1 << 62, 10_000).tolist())
    with pytest.raises(TransportError, match=r"10000 regions make a descriptor of \d+ bytes, more than 49152"):
        descriptor.encode(Told("host", regions), len(regions))


def test_slots_of_a_scratch_never_touch_its_token():
    scratch = Scratch()
    token = scratch.token
    assert len(token) == TOKEN_BYTES
    assert token != Scratch().token
    assert scratch.region.nbytes == SLOTS * TOKEN_BYTES
    memory = scratch._slots.reshape(-1)
    places = set()
    for _ in range(2 * SLOTS):
        slot = scratch.take()
        assert scratch.found(slot) == bytes(TOKEN_BYTES)
        begin = scratch.address_of(slot) - scratch.region.address
        memory[begin : begin + TOKEN_BYTES] = 7
        assert scratch.found(slot) == b"\x07" * TOKEN_BYTES
        places.add(slot)
    assert len(places) == SLOTS - 1
    assert scratch.token == token


@pytest.mark.parametrize("name", FABRICS)
def test_adapters_are_found_without_their_libraries(name):
    adapter = adapter_of(name)
    assert issubclass(adapter, Fabric)
    assert adapter.name == name
    assert adapter.costs.piece_seconds > 0
    assert all(option and text for option, text in adapter.OPTIONS.items())
