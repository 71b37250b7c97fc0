"""The errors of kvbaton, drawn as a tree.

KVBatonError
├── LayoutError              a rank's own description does not hold together (found at registration)
│   └── ShardError           an axis does not divide over the ranks
├── HandshakeError           two sides do not fit each other
│   ├── LayoutMismatch       an axis, a dtype, a component or a layer differs
│   ├── VersionMismatch      the two sides speak different versions of the protocol
│   └── SelfConnection       a peer answered with our own instance id
├── ProtocolError            a message that cannot be decoded, or that breaks a rule
├── RowsError                row indices or token ranges that do not fit what was registered
├── RoomError                a room that is in use, or used against its life cycle
├── TransferFailed           a room ended without its data (the reason names part, rank and step)
│   ├── TransferAborted      one of the two sides asked for it
│   ├── DigestMismatch       what is in place is not what was sent
│   ├── PeerLost             the peer died, was replaced or cannot be reached
│   └── DeadlineExceeded     a state lasted longer than it may
├── AddressError             the text of an address cannot be understood, or cannot be advertised
├── AuthenticationError      the other side does not share our secret
├── RegistryError            the bootstrap service refused, or cannot be reached
├── TransportError           a transport failed
│   └── TransportUnavailable this machine or this memory lacks what the transport needs
└── ConfigurationError       a setting that cannot be used as given

Each message names the side, the component and both numbers where there are two, and says what to change.
"""

from __future__ import annotations


class KVBatonError(Exception):
    """Base of every error that kvbaton raises on purpose."""


class LayoutError(KVBatonError):
    """A rank's own description of its memory does not hold together."""


class ShardError(LayoutError):
    """An axis, or one of its sub-blocks, does not divide over the ranks."""


class HandshakeError(KVBatonError):
    """Two sides do not fit each other; no byte has moved."""


class LayoutMismatch(HandshakeError):
    """An axis, a dtype, a component or a layer differs between the two sides."""


class VersionMismatch(HandshakeError):
    """The two sides speak different versions of the protocol."""


class SelfConnection(HandshakeError):
    """A peer answered with our own instance id."""


class ProtocolError(KVBatonError):
    """A message that cannot be decoded, or that breaks a rule of the protocol."""


class RowsError(KVBatonError):
    """Row indices or token ranges that do not fit what was registered."""


class RoomError(KVBatonError):
    """A room that is already in use, or is used against its life cycle."""


class TransferFailed(KVBatonError):
    """A room ended without its data; the message names part, rank and step."""


class TransferAborted(TransferFailed):
    """One of the two sides asked for the transfer to stop."""


class DigestMismatch(TransferFailed):
    """The bytes that are in place are not those that were sent; the message names the component and both digests."""


class PeerLost(TransferFailed):
    """The peer died, was replaced, or cannot be reached."""


class DeadlineExceeded(TransferFailed):
    """A state lasted longer than it may."""


class AddressError(KVBatonError):
    """The text of an address cannot be understood, or cannot be advertised."""


class AuthenticationError(KVBatonError):
    """The other side does not share our secret: it has another one, or one of the two has none."""


class RegistryError(KVBatonError):
    """The bootstrap service refused a request, or cannot be reached."""


class TransportError(KVBatonError):
    """A transport failed."""


class TransportUnavailable(TransportError):
    """The machine, or the memory, lacks what the transport needs."""


class ConfigurationError(KVBatonError):
    """A setting that cannot be used as given."""
