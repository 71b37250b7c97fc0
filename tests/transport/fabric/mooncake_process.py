"""What processes of the tests of Mooncake do: where their ends are, and what an owner of memory is told."""

import contextlib
import socket
import threading

from peer_process import LIMIT

from kvbaton.errors import TransportUnavailable
from kvbaton.transport import create
from kvbaton.transport.fabric.mooncake.adapter import MooncakeFabric
from kvbaton.transport.fabric.mooncake.engine import library

SMALL = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}
TCP = {"protocol": "tcp"}
PLACES = {
    "tcp": ("127.0.0.1", TCP),
    "rxe0": ("10.77.0.1", {"protocol": "rdma", "devices": "rxe0"}),
    "rxe1": ("10.77.0.2", {"protocol": "rdma", "devices": "rxe1"}),
}
"""Where a process is: the address, and the options of its engine."""

try:
    library()
    MISSING = ""
except TransportUnavailable as error:
    MISSING = f"{error}; make setup-fabrics does that"


def engine(instance, place="tcp"):
    bind, options = PLACES[place]
    return MooncakeFabric(instance, bind, options=options)


def take_away(fabric, region):
    """For an owner: its region cannot be written to any more."""
    return fabric._engine.unregister_memory(int(fabric._bases[region]))


def give_back(fabric, region):
    return fabric._engine.register_memory(int(fabric._bases[region]), fabric._owners[region].nbytes)


def port(fabric):
    """Where its engine answers handshakes."""
    return fabric._engine.get_rpc_port()


class Relay:
    """Passes what comes to its own port on to ``port``, one exchange of a handshake at a time."""

    def __enter__(self):
        self.port = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return self

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                with caller, socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT) as called:
                    back = threading.Thread(target=copy, args=(called, caller))
                    back.start()
                    copy(caller, called)
                    back.join()

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


def copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def transport(executor, instance, place="tcp"):
    bind, options = PLACES[place]
    return create("mooncake", instance=instance, bind=bind, options=options | SMALL | {"executor": executor})
