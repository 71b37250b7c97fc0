import msgspec
import pytest

from kvbaton.errors import HandshakeError, LayoutMismatch, SelfConnection, VersionMismatch
from kvbaton.layout import AUX, PAGED, SLOT, Axis, Component, Coords, Ownership, RankLayout, Tensor, window
from kvbaton.protocol import (
    PROTOCOL_VERSION,
    ComponentNeed,
    PeerShare,
    Refused,
    Welcome,
    answer_hello,
    check_welcome,
    decode,
    encode,
    make_hello,
    refusal,
    refuse,
)
from kvbaton.protocol.packed import pack_layout

HEADS = 4


def rank(tp, of, *, heads=HEADS, dtype="bfloat16", rows=8, aux=False, windowed=False):
    """One rank of a small hybrid model: sliced heads, a state on every rank, and aux data if asked for."""
    share = max(heads // of, 1)
    span = (tp * heads // of, share)
    axes = (
        Axis("token", 2, 8 * share, ((0, 2),)),
        Axis("head", heads, 8, (span,)),
        Axis("dim", 4, 2, ((0, 4),)),
    )
    key = Tensor("key", 0, 0, 0, rows, 16 * share, dtype, axes)
    state = Tensor("recurrent", 1, 1, 0, rows, 32, "float32", (Axis("value", 8, 4, ((0, 8),)),))
    components = [Component("kv", PAGED, (key,), page_size=2), Component("gdn", SLOT, (state,))]
    if windowed:
        components[0] = Component("kv", window(4), (key,), page_size=2)
    if aux:
        token = Tensor("token", 0, 2, 0, rows, 8, "int64", (Axis("value", 1, 8, ((0, 1),)),))
        components.append(Component("first", AUX, (token,)))
    return RankLayout(tuple(components), Coords(tp=(tp, of)))


def grid(of, **options):
    return [rank(tp, of, **options) for tp in range(of)]


def hello(sources, own, *, source_index=0, destination_index=0, destinations=1, **changes):
    message = make_hello(
        instance="decode",
        model="tiny",
        layout=own,
        destination_index=destination_index,
        destinations=destinations,
        sources=sources,
        source_index=source_index,
        transports={"tcp": b"t", "shm": b"s"},
    )
    if "layout" in changes:
        changes["layout"] = pack_layout(changes["layout"])
    (decoded,) = decode(encode(msgspec.structs.replace(message, **changes)))
    return decoded


def answer(message, layout, **changes):
    options = {"instance": "prefill", "model": "tiny", "layout": layout, "transports": ("cuda", "shm", "tcp")}
    return answer_hello(message, **{**options, **changes})


def test_a_handshake_that_holds():
    sources = grid(2)
    message = hello(sources, rank(0, 1), source_index=1)
    accepted = answer(message, sources[1])
    # Both ranks hold the state; one of them sends it.
    assert accepted.share == PeerShare({"kv": ComponentNeed(PAGED)}, 0, 1, part=1, sends=True, carries_aux=False)
    assert accepted.plan.components == ("kv",)
    assert accepted.transports == ("shm", "tcp")
    (welcome,) = decode(encode(accepted.welcome("prefill", "shm", b"mine")))
    assert welcome == Welcome("prefill", "shm", b"mine", (0, 1))
    check_welcome(message, welcome)


def test_the_share_carries_what_the_core_must_know():
    owned = msgspec.structs.replace(rank(0, 1, aux=True, windowed=True), owned=Ownership(2, 1, 0))
    accepted = answer(hello([owned], owned), owned)
    assert accepted.share.components == {
        "kv": ComponentNeed(window(4), Ownership(2, 1, 0)),
        "gdn": ComponentNeed(SLOT),
    }
    assert accepted.share.carries_aux


@pytest.mark.parametrize("aux", ["control", "fabric"])
@pytest.mark.parametrize("has_aux", [True, False])
def test_how_aux_data_travel_is_settled_by_both(aux, has_aux):
    layout = rank(0, 1, aux=has_aux)
    message = hello([layout], layout, aux="fabric")
    accepted = answer(message, layout)
    assert accepted.share.writes_aux is False
    assert accepted.share_with(aux).writes_aux == (has_aux and aux == "fabric")
    (welcome,) = decode(encode(accepted.welcome("prefill", "tcp", b"", aux=aux, reason="x" * 5000)))
    assert welcome.aux == aux
    assert welcome.reason.endswith("...")
    check_welcome(message, welcome)


def test_ranks_with_nothing_to_send_are_not_expected():
    # Four source ranks hold two heads, twice; a destination with both heads needs two of them.
    sources = [rank(tp, 4, heads=2) for tp in range(4)]
    senders = []
    for source_index, layout in enumerate(sources):
        message = hello(sources, rank(0, 1, heads=2), source_index=source_index)
        accepted = answer(message, layout)
        check_welcome(message, accepted.welcome("prefill", "tcp", b""))
        assert accepted.share.sends == (source_index in accepted.parts)
        assert accepted.share.sends == bool(accepted.plan.components)
        senders.append(accepted.parts)
    assert len(set(senders)) == 1
    assert len(senders[0]) == 2


def test_both_sides_settle_by_the_hello_whether_dtypes_may_differ():
    sources, own = grid(2), rank(0, 1, dtype="float16")
    with pytest.raises(
        LayoutMismatch, match=r"bfloat16 at the source and float16 at the destination .* Settings\(cast=True"
    ):
        answer(hello(sources, own), sources[0])
    message = hello(sources, own, cast=True)
    accepted = answer(message, sources[0])
    assert accepted.parts == (0, 1)
    check_welcome(message, accepted.welcome("prefill", "shm", b""))


def test_if_nobody_has_anything_to_send_part_0_ends_the_room():
    empty = RankLayout(())
    sources = [empty, empty]
    for source_index, sends in ((0, True), (1, False)):
        message = hello(sources, empty, source_index=source_index)
        accepted = answer(message, empty)
        assert accepted.parts == (0,)
        assert accepted.share == PeerShare({}, 0, 1, source_index, sends)
        check_welcome(message, accepted.welcome("prefill", "tcp", b""))


REFUSALS = [
    (
        {"version": PROTOCOL_VERSION + 1},
        {},
        VersionMismatch,
        rf"version {PROTOCOL_VERSION + 1} .* version\s+{PROTOCOL_VERSION}",
    ),
    ({"instance": "prefill"}, {}, SelfConnection, "'prefill' reached itself"),
    ({"model": "other"}, {}, HandshakeError, "'other'.*'tiny'"),
    ({"destination_index": 1}, {}, HandshakeError, "number 1 of 1"),
    ({"source_index": 1}, {}, HandshakeError, "number 1 of 1"),
    ({"transports": {"nixl": b""}}, {}, HandshakeError, "cuda, shm, tcp.*nixl"),
    ({"transports": {}}, {}, HandshakeError, "none"),
    ({}, {"layout": rank(0, 1, rows=9)}, LayoutMismatch, "stale"),
    ({"layout": rank(0, 1, dtype="float16")}, {}, LayoutMismatch, "kv.*(bfloat16|float16).*(bfloat16|float16)"),
    ({"layout": rank(0, 1, heads=8)}, {}, LayoutMismatch, "head.*8.*4|head.*4.*8"),
    ({"layout": rank(0, 1, aux=True)}, {}, LayoutMismatch, "first"),
    (
        {"layout": msgspec.structs.replace(rank(0, 1), coords=Coords(tp=(2, 1)))},
        {},
        HandshakeError,
        "does not hold together.*tp",
    ),
]


@pytest.mark.parametrize(("changes", "own", "error", "text"), REFUSALS)
def test_what_does_not_fit_is_refused_with_its_reason(changes, own, error, text):
    message = hello([rank(0, 1)], rank(0, 1), **changes)
    with pytest.raises(error, match=text) as caught:
        answer(message, **{"layout": rank(0, 1), **own})
    assert type(caught.value) is error
    # The other side raises the same.
    (refused,) = decode(encode(refuse("prefill", caught.value)))
    asked = msgspec.structs.replace(message, instance="decode")
    there = refusal(asked, refused)
    assert type(there) is error
    assert str(there) == str(caught.value)


def test_layouts_of_other_ranks_in_the_hello_are_checked_too():
    broken = msgspec.structs.replace(rank(1, 2), coords=Coords(tp=(5, 2)))
    with pytest.raises(HandshakeError, match="does not hold together"):
        answer(hello([rank(0, 2), broken], rank(0, 1)), rank(0, 2))


def test_a_refusal_by_ourselves_is_a_self_connection():
    message = hello([rank(0, 1)], rank(0, 1))
    assert type(refusal(message, Refused("decode", "?"))) is SelfConnection


@pytest.mark.parametrize("error", ["SystemExit", "TransportError", "LayoutError"])
def test_a_refusal_of_another_name_is_a_handshake_error(error):
    message = hello([rank(0, 1)], rank(0, 1))
    assert type(refusal(message, Refused("prefill", "why", error))) is HandshakeError


def test_an_unforeseen_error_becomes_a_refusal():
    assert refuse("prefill", ZeroDivisionError("x" * 5000)).error == "HandshakeError"
    assert decode(encode(refuse("prefill", ZeroDivisionError("x" * 5000))))[0].reason.endswith("...")


@pytest.mark.parametrize(
    ("welcome", "error", "text"),
    [
        (Welcome("decode", "tcp", b"", (0,)), SelfConnection, "reached itself"),
        (Welcome("prefill", "nixl", b"", (0,)), HandshakeError, "'nixl'.*tcp, shm"),
        (Welcome("prefill", "tcp", b"", (0, 1)), HandshakeError, r"\[0, 1\].*\[0\]"),
        (Welcome("prefill", "tcp", b"", (0,), "fabric"), HandshakeError, "write aux data by the transport"),
    ],
)
def test_a_welcome_that_does_not_fit(welcome, error, text):
    with pytest.raises(error, match=text):
        check_welcome(hello([rank(0, 1)], rank(0, 1)), welcome)


def test_both_sides_agree_when_work_is_striped():
    sources = [rank(tp, 2) for tp in (0, 0)]
    sources = [msgspec.structs.replace(layout, coords=Coords(tp=(tp, 2))) for tp, layout in enumerate(sources)]
    own = rank(0, 2)
    message = hello(sources, own, striped=True)
    striped = answer(message, sources[0])
    check_welcome(message, striped.welcome("prefill", "tcp", b""))
    assert striped.parts == (0, 1)
    assert answer(hello(sources, own), sources[0]).parts == (0,)
    with pytest.raises(HandshakeError, match=r"\[0, 1\] send.*\[0\]"):
        check_welcome(hello(sources, own), striped.welcome("prefill", "tcp", b""))
