import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvbaton.address import Endpoint, advertised
from kvbaton.errors import AddressError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:8998", "10.0.0.1", 8998),
        ("[2001:db8::1]:8998", "2001:db8::1", 8998),
        ("2001:db8::1", "2001:db8::1", None),
        ("node-3", "node-3", None),
        ("node-3:8998", "node-3", 8998),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("a_b.example.org.:0", "a_b.example.org.", 0),
        ("::", "::", None),
    ],
)
def test_round_trip_is_exact(text, host, port):
    endpoint = Endpoint.parse(text)
    assert endpoint == Endpoint(host, port)
    assert str(endpoint) == text


def test_brackets_without_a_port_name_the_same_endpoint():
    assert Endpoint.parse("[::1]") == Endpoint("::1") == Endpoint.parse(str(Endpoint.parse("[::1]")))
    # As soon as a port follows, the brackets are printed.
    assert str(Endpoint.parse("[::1]", 8998)) == "[::1]:8998"


@pytest.mark.parametrize(
    ("text", "default", "expected"),
    [
        ("node-3", 8998, "node-3:8998"),
        ("node-3:1", 8998, "node-3:1"),
        ("2001:db8::1", 8998, "[2001:db8::1]:8998"),
        ("2001:db8::1:8998", 1, "[2001:db8::1:8998]:1"),
    ],
)
def test_a_default_port_is_used_where_none_is_given(text, default, expected):
    assert str(Endpoint.parse(text, default)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (":8998", "has no host"),
        ("", "has no host"),
        ("10.0.0.1:99999", "'99999' is no port"),
        ("10.0.0.1:", "has no port"),
        ("[::1]:", "has no port"),
        ("node:+1", r"'\+1' is no port"),
        ("node:1 ", "'1 ' is no port"),
        ("node:٣", "is no port"),
        ("node:-1", "'-1' is no port"),
        ("[::1", "not closed"),
        ("[::1]8998", "no :port"),
        ("[node-3]:8998", "no IPv6"),
        ("[10.0.0.1]:8998", "no IPv6"),
        ("[]:8998", "has no host"),
        ("1::2::3", "no IPv6"),
        ("tcp://node:1", "no IPv6"),
        ("tcp://node", "is no port"),
        ("999.0.0.1:1", "no IPv4"),
        ("10.0.0:1", "no IPv4"),
        ("a b:1", "neither"),
        ("-a:1", "neither"),
        ("a..b", "neither"),
        ("a/b:1", "neither"),
        ("fe80::1%:1", "no name of an interface|no IPv6"),
        ("node\n:1", "neither"),
        ("a" * 301, "too long"),
    ],
)
def test_what_is_no_address_says_why(text, why):
    with pytest.raises(AddressError, match=why):
        Endpoint.parse(text)


@given(st.text(st.sampled_from("abz019.:-[]%*/ \n"), max_size=20))
def test_any_text_is_an_endpoint_that_prints_and_parses_to_itself_or_the_named_error(text):
    try:
        endpoint = Endpoint.parse(text)
    except AddressError:
        return
    assert Endpoint.parse(str(endpoint)) == endpoint


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_round_trips(address, port):
    endpoint = Endpoint(str(address), port)
    assert Endpoint.parse(str(endpoint)) == endpoint
    assert ("[" in str(endpoint)) == (address.version == 6)
    assert endpoint.url == f"tcp://{endpoint}"


def test_a_url_needs_a_port():
    with pytest.raises(AddressError, match=r"no port.*\[::1\]:8998"):
        _ = Endpoint("::1").url


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "[::]", "*", "::ffff:0.0.0.0", "0:0:0:0:0:0:0:0"])
def test_a_wildcard_is_never_advertised(bind):
    with pytest.raises(AddressError, match="advertise="):
        advertised(bind)
    with pytest.raises(AddressError, match="advertise="):
        advertised("10.0.0.1", bind)
    assert advertised(bind, "10.0.0.1") == "10.0.0.1"
    assert Endpoint(bind.strip("[]")).is_wildcard


@pytest.mark.parametrize("bind", ["10.0.0.1", "node-3", "2001:db8::1"])
def test_a_bound_address_is_advertised_as_it_is(bind):
    assert advertised(bind) == bind
    assert advertised(f"[{bind}]" if ":" in bind else bind) == bind
    assert not Endpoint(bind).is_wildcard


@pytest.mark.parametrize("advertise", ["", "node:1", "a b"])
def test_an_advertised_address_is_a_host(advertise):
    with pytest.raises(AddressError):
        advertised("10.0.0.1", advertise)
