"""Who may speak of rooms at a prefill rank: those that said who they are."""

from types import SimpleNamespace

from kvbaton.errors import HandshakeError, ProtocolError
from kvbaton.protocol import Refused
from kvbaton.runtime.destinations import Destinations


def destinations():
    sent = []
    context = SimpleNamespace(instance="prefill", send=lambda peer, message: sent.append((peer, message)))
    context.observation = SimpleNamespace(handshake_refused=lambda *words: None, peer_lost=lambda *words: None)
    core = SimpleNamespace(peer_lost=lambda peer, reason, now: [])
    context.now = lambda: 0.0
    return Destinations(context, core, lambda actions: None), sent


def test_a_stranger_that_is_refused_for_garbage_is_not_taken_for_a_decode_rank():
    """Else it could end any room that waits for its decode ranks, by number."""
    here, sent = destinations()
    here.on_malformed("in:1", ProtocolError("no frame of ours"))
    assert [type(message) for _, message in sent] == [Refused]
    assert here.outside("in:1") is None
    here.on_malformed("in:1", ProtocolError("no frame of ours"))
    assert len(sent) == 1
    here.on_disconnected("in:1", "gone")
    here.on_malformed("in:1", ProtocolError("no frame of ours"))
    assert len(sent) == 2


def test_a_decode_rank_is_known_by_its_index_from_its_hello_on():
    here, sent = destinations()
    hello = SimpleNamespace(destination_index=3)
    here._handshakes["in:1"] = hello
    assert here.outside("in:1") == 3
    here._refuse("in:1", hello, HandshakeError("another model"))
    assert [type(message) for _, message in sent] == [Refused]
    assert here.outside("in:1") == 3
    assert here.outside("in:2") is None
