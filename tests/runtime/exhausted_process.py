"""A process that listens and may open few more descriptors: ``python exhausted_process.py KIND``.

Prints its address, and for each line on its standard input the seconds of CPU time that it has used. Warnings are
printed as they come.
"""

import logging
import os
import resource
import sys
import threading

import numpy as np

from kvbaton.memory import Region

SPARE = 12


def tcp():
    from kvbaton.transport.tcp import TcpTransport

    transport = TcpTransport("target")
    transport.register([Region.of(np.zeros(64, np.uint8))])
    return transport, f"{transport.port} {transport._token.hex()}"


def fabric():
    from kvbaton.transport.fabric.memory import MemoryFabric
    from kvbaton.transport.fabric.transport import FabricTransport

    options = {"slabs": "4", "slab_bytes": "64KiB", "staging_slabs": "2"}
    transport = FabricTransport("target", MemoryFabric("target"), options=options)
    transport.register([Region.of(np.zeros(64, np.uint8))])
    return transport, f"{transport.port} {transport._token.hex()}"


def control():
    import kvbaton as kb
    from kvbaton.layout import build

    layout = kb.RankLayout((build.paged_kv(layers=[0], rows=2, page_size=4, heads=1, head_dim=4, dtype="float32"),))
    memory = kb.SharedMemory(build.required_bytes(layout.components)[0])
    manager = kb.Manager(
        layout, [Region.of(memory)], role="prefill", registry=kb.MemoryRegistry(), transports=["loopback"]
    )
    return (manager, memory), manager.endpoint.rsplit(":", 1)[1]


def registry():
    from kvbaton.registry.server import RegistryServer

    server = RegistryServer()
    server.start()
    return server, str(server.port)


def doctor():
    from kvbaton.doctor.serve import DoctorServer

    server = DoctorServer("127.0.0.1:0")
    threading.Thread(target=server.run, daemon=True).start()
    return server, str(server.address.port)


def say(line):
    # In one piece: warnings come from other threads.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main():
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
    kept, address = globals()[sys.argv[1]]()
    limit = len(os.listdir("/proc/self/fd")) + SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    say(f"listens {address}")
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        say(f"used {used.ru_utime + used.ru_stime}")
    os._exit(0 if kept else 1)


if __name__ == "__main__":
    main()
