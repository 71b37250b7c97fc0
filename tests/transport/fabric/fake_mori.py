"""A fake of ``mori.io`` for machines without the library: it does what the library is documented to do, traps included.

It proves nothing about MORI-IO. It is strict: where the library would end the process it raises `ProcessEnded`, and
what would corrupt memory is noted in `World.violations`. Bytes really move, out of order, when a status is asked.
"""

import ctypes
import ipaddress
import os
import random
import socket
import sys
import threading
import types
import weakref
from collections import deque

import msgspec

DEPTH = 8192
STEP = 256


class ProcessEnded(BaseException):
    """The library would have called exit or abort here."""


class Enum:
    """A value of the library's enums: no int, and not equal to one."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def __int__(self):
        return self.value

    def __repr__(self):
        return self.name


def enum(**values):
    return types.SimpleNamespace(**{name: Enum(name, value) for name, value in values.items()})


StatusCode = enum(SUCCESS=0, INIT=1, IN_PROGRESS=2, ERR_INVALID_ARGS=11, ERR_RDMA_OP=13, ERR_BAD_STATE=14)
BackendType = enum(XGMI=1, RDMA=2, TCP=3)
MemoryLocationType = enum(Unknown=0, CPU=1, GPU=2)
PollCqMode = enum(POLLING=0, EVENT=1)
PeerFailureReason = enum(PEER_UNREACHABLE=1)


class World:
    """All engines of this process, and what a test does to them."""

    def __init__(self):
        self.engines = {}
        self.pairs = []
        self.violations = []
        self.hold = False
        """Nothing moves while True."""
        self.stall = None
        """A number: queue pairs of that number in their session do not move."""
        self.gpus = 1
        self.lock = threading.RLock()
        self.random = random.Random(1)

    def progress(self):
        with self.lock:
            if self.hold:
                return
            for pair in self.random.sample(self.pairs, len(self.pairs)):
                if pair.number != self.stall:
                    for _ in range(STEP):
                        if not pair.queue:
                            break
                        pair.execute()

    def violate(self, what):
        self.violations.append(what)
        raise ProcessEnded(what)


class TransferStatus:
    def __init__(self, world):
        self._world, self._code, self._message = world, StatusCode.INIT, ""

    def Code(self):  # noqa: N802
        return self._code

    def Message(self):  # noqa: N802
        return self._message

    def Failed(self):  # noqa: N802
        return int(self._code) > 10

    def WaitFor(self, timeout_ms=-1):  # noqa: N802
        if not isinstance(timeout_ms, int):
            raise TypeError("incompatible function arguments")
        self._world.progress()
        return self._code

    def set(self, code, message=""):
        # A failure is the last word.
        if not self.Failed():
            self._code, self._message = code, message


class Batch:
    """What the library knows of a status: its address, and how much is left."""

    def __init__(self, world, status, tails):
        self.world, self.status, self.tails, self.silent = world, weakref.ref(status), tails, False

    def tail(self, error=""):
        if self.silent:
            return
        status = self.status()
        if status is None:
            self.world.violations.append("the library wrote into a status that was freed")
            return
        self.tails -= 1
        if error:
            status.set(StatusCode.ERR_RDMA_OP, error)
            self.silent = True
        elif not self.tails:
            status.set(StatusCode.SUCCESS, "success")


class QueuePair:
    """Keeps its order; after the first error it only flushes, for ever."""

    def __init__(self, engine, target, number):
        self.engine, self.target, self.number = engine, target, number
        self.queue = deque()
        self.dead = False
        self.moved = 0

    def execute(self):
        local, local_key, remote, remote_key, length, is_read, batch, is_tail = self.queue.popleft()
        if self.dead:
            if is_tail:
                batch.tail("Work Request Flushed Error")
            return
        error = self._error(local_key, remote_key)
        if error:
            self.dead = True
            batch.tail(error)
            return
        if length:
            ctypes.memmove(*((local, remote) if is_read else (remote, local)), length)
            self.moved += 1
        if is_tail:
            batch.tail()

    def _error(self, local_key, remote_key):
        if self.target.killed:
            self.engine.failures.append(
                types.SimpleNamespace(
                    remote_engine_key=self.alias, reason=PeerFailureReason.PEER_UNREACHABLE, detail="retries exceeded"
                )
            )
            return "transport retry counter exceeded"
        if local_key not in self.engine.keys:
            return "local protection error"
        return "" if remote_key in self.target.keys else "remote access error"


class Description:
    """An engine's or a memory's description: read-only fields, packed as a msgpack array."""

    fields = ()

    def __init__(self, values):
        self.__dict__.update(zip(self.fields, values, strict=True))

    def pack(self):
        return msgspec.msgpack.encode([getattr(self, field) for field in self.fields])

    @classmethod
    def unpack(cls, packed):
        try:
            values = msgspec.msgpack.decode(packed)
            if len(values) != len(cls.fields):
                raise ValueError
        except (msgspec.DecodeError, ValueError, TypeError):
            raise RuntimeError("std::bad_cast") from None
        return cls(values)


class EngineDesc(Description):
    fields = ("key", "node_id", "hostname", "host", "port", "pid")


class MemoryDesc(Description):
    fields = ("engine_key", "id", "device_id", "device_bus_id", "data", "size", "loc", "ipc_handle", "numa_node")


class RdmaBackendConfig:
    def __init__(
        self,
        qp_per_transfer=1,
        post_batch_size=-1,
        num_worker_threads=-1,
        poll_cq_mode=PollCqMode.POLLING,
        enable_notification=True,
    ):
        self.qp_per_transfer = int(os.environ.get("MORI_IO_QP_PER_TRANSFER", qp_per_transfer))
        self.num_worker_threads, self.poll_cq_mode = num_worker_threads, poll_cq_mode
        self.enable_notification = enable_notification
        if not isinstance(poll_cq_mode, Enum):
            raise TypeError("incompatible function arguments")


class IOEngineConfig:
    def __init__(self, host="", port=0):
        self.host, self.port = host, port


class IOEngine:
    world = None

    def __init__(self, key, config):
        self.key, self.config = key, config
        self.backends = {}
        self.remotes = {}
        self.memories = {}
        self.pinned = {}
        """Address to key: the library keys what it pinned by address."""
        self.keys = set()
        self.cached_pairs, self.cached_keys = {}, {}
        self.failures = deque()
        self.killed = False
        self.hung = False
        self.listener = None
        self.registrations = 0

    def create_backend(self, type, config=None):
        if type is BackendType.TCP:
            raise ProcessEnded("assert: not implemented")
        if type is BackendType.RDMA:
            self.devices = os.environ.get("MORI_RDMA_DEVICES", "")
            if self.devices == "none":
                raise RuntimeError("no active RDMA device on this host")
            if not self.world.gpus:
                raise ProcessEnded("rsmi_num_monitor_devices reported 0 GPUs")
            try:
                ipaddress.IPv4Address(self.config.host)
            except ValueError:
                self.world.violate(f"bound to 255.255.255.255 for {self.config.host!r}")
            self.listener = socket.socket()
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                self.listener.bind((self.config.host, self.config.port))
                self.listener.listen()
            except OSError as error:
                raise ProcessEnded(f"exit(-1): {error}") from error
            self.config.port = self.listener.getsockname()[1]
            self.world.engines[self.config.host, self.config.port] = self
        self.backends[type] = config

    def remove_backend(self, type):
        del self.backends[type]
        if type is BackendType.RDMA:
            self.listener.close()
            self.world.engines.pop((self.config.host, self.config.port))
            self.keys.clear()
            with self.world.lock:
                self.world.pairs = [pair for pair in self.world.pairs if pair.engine is not self]

    def get_engine_desc(self):
        return EngineDesc([self.key, "node", "host", self.config.host, self.config.port, os.getpid()])

    def register_remote_engine(self, desc):
        self.remotes[desc.key] = desc

    def deregister_remote_engine(self, desc):
        self.remotes.pop(desc.key, None)

    def register_memory(self, pointer, size, device_id, where):
        if not pointer:
            raise ValueError("PyCapsule_New called with null pointer")
        number = self.registrations
        self.registrations += 1
        node = -1 if where is MemoryLocationType.GPU else 0
        self.memories[number] = memory = MemoryDesc(
            [self.key, number, device_id, "", pointer, size, int(where), b"\0" * 64, node]
        )
        return memory

    def deregister_memory(self, desc):
        self.keys.discard(self.pinned.pop(desc.data, None))
        del self.memories[desc.id]

    def pin(self, number):
        """The key of a memory; aborts as ibv_reg_mr makes the library do."""
        memory = self.memories[number]
        if memory.size == 0:
            raise ProcessEnded("ibv_reg_mr failed: abort")
        key = (self.key, number)
        self.pinned[memory.data] = key
        self.keys.add(key)
        return key

    def create_session(self, local, remote):
        if local.engine_key != self.key:
            raise RuntimeError("not our memory")
        gpus = int(MemoryLocationType.GPU) == local.loc == remote.loc
        if BackendType.XGMI in self.backends and gpus and remote.engine_key in self.remotes:
            return IOEngineSession(self, None, local, remote, None)
        if BackendType.RDMA not in self.backends or remote.engine_key not in self.remotes:
            return None
        desc = self.remotes[remote.engine_key]
        target = self.world.engines.get((desc.host, desc.port))
        places = tuple((memory.loc, memory.device_id, memory.numa_node) for memory in (local, remote))
        pairs = self.cached_pairs.setdefault((remote.engine_key, places), [])
        wanted = self.backends[BackendType.RDMA].qp_per_transfer
        key = self.cached_keys.get((remote.engine_key, remote.id))
        if len(pairs) < wanted or key is None:
            if target is None or target.killed:
                raise RuntimeError(f"connect({desc.host}:{desc.port}): Connection refused")
            if target.hung:
                raise RuntimeError("control plane: timed out")
        while len(pairs) < wanted:
            pair = QueuePair(self, target, len(pairs))
            pair.alias = remote.engine_key
            pairs.append(pair)
            self.world.pairs.append(pair)
        if key is None:
            there = target.memories.get(remote.id)
            if there is None or there.size != remote.size:
                raise RuntimeError("remote MR size mismatch: got=0")
            key = target.pin(remote.id), there.data
            self.cached_keys[remote.engine_key, remote.id] = key
        return IOEngineSession(self, list(pairs), local, remote, (self.pin(local.id), *key))

    def pop_peer_failure(self):
        return self.failures.popleft() if self.failures else None


class IOEngineSession:
    def __init__(self, engine, pairs, local, remote, keys):
        self.engine, self.pairs, self.local, self.remote, self.keys = engine, pairs, local, remote, keys

    def alive(self):
        return not any(pair.dead for pair in self.pairs or ())

    def read(self, local_offset, remote_offset, size, uid):
        return self._post([local_offset], [remote_offset], [size], uid, True)

    def write(self, local_offset, remote_offset, size, uid):
        return self._post([local_offset], [remote_offset], [size], uid, False)

    def batch_write(self, local_offsets, remote_offsets, sizes, uid):
        return self._post(local_offsets, remote_offsets, sizes, uid, False)

    def _post(self, local_offsets, remote_offsets, sizes, uid, is_read):
        world = self.engine.world
        if not self.engine.backends:
            world.violate("a session was used after its engine: SIGSEGV")
        for column in (local_offsets, remote_offsets, sizes):
            if any(isinstance(value, float) or value < 0 for value in column):
                raise TypeError("incompatible function arguments")
        status = TransferStatus(world)
        status.set(StatusCode.IN_PROGRESS)
        with world.lock:
            self._start(status, local_offsets, remote_offsets, sizes, uid, is_read)
        return status

    def _start(self, status, local_offsets, remote_offsets, sizes, uid, is_read):
        world = self.engine.world
        if not len(local_offsets) == len(remote_offsets) == len(sizes):
            if self.pairs is None:
                raise ProcessEnded("assert(batchSize == localOffsets.size())")
            status.set(StatusCode.ERR_INVALID_ARGS, "lengths mismatch")
            return
        entries = list(zip(local_offsets, remote_offsets, sizes, strict=True))
        for local, remote, size in entries:
            if local + size > self.local.size or remote + size > self.remote.size or size >= 1 << 32:
                status.set(StatusCode.ERR_INVALID_ARGS, "length out of range")
                return
        if sum(sizes) > 1 << 31:
            status.set(StatusCode.ERR_INVALID_ARGS, "merged RDMA WR exceeds local max_msg_sz")
            return
        if not entries:
            status.set(StatusCode.SUCCESS)
            return
        world.random.shuffle(entries)
        if self.pairs is None:
            # GPU memory is host memory here; the copy is over when it is asked for.
            for local, remote, size in entries:
                ctypes.memmove(self.remote.data + remote, self.local.data + local, size)
            status.set(StatusCode.SUCCESS)
            return
        local_key, remote_key, remote_base = self.keys
        share = -(-len(entries) // len(self.pairs))
        parts = [entries[at : at + share] for at in range(0, len(entries), share)]
        batch = Batch(world, status, len(parts))
        for number, part in enumerate(parts):
            pair = self.pairs[(uid + number) % len(self.pairs)]
            if len(pair.queue) + len(part) > DEPTH:
                status.set(StatusCode.ERR_RDMA_OP, "SQ full (batch)")
                return
            for at, (local, remote, size) in enumerate(part):
                places = self.local.data + local, local_key, remote_base + remote, remote_key
                pair.queue.append((*places, size, is_read, batch, at == len(part) - 1))


def install(monkeypatch):
    """Put the fake in the place of ``mori.io``, torch (as a ROCm build) and rocm_smi; its `World`."""
    world = World()
    engine = type("IOEngine", (IOEngine,), {"world": world})
    io = types.ModuleType("mori.io")
    names = (BackendType, MemoryLocationType, PollCqMode, StatusCode)
    for name, value in zip(("BackendType", "MemoryLocationType", "PollCqMode", "StatusCode"), names, strict=True):
        setattr(io, name, value)
    io.IOEngine, io.IOEngineConfig, io.RdmaBackendConfig = engine, IOEngineConfig, RdmaBackendConfig
    io.XgmiBackendConfig = types.SimpleNamespace
    io.EngineDesc, io.MemoryDesc = EngineDesc, MemoryDesc
    mori = types.ModuleType("mori")
    mori.io = io
    torch = types.ModuleType("torch")
    torch.version = types.SimpleNamespace(hip="7.2")
    torch.cuda = types.SimpleNamespace(is_available=lambda: world.gpus > 0)
    for name, module in {"mori": mori, "mori.io": io, "torch": torch}.items():
        monkeypatch.setitem(sys.modules, name, module)
    smi = types.SimpleNamespace(
        rsmi_init=lambda flags: 0,
        rsmi_num_monitor_devices=lambda count: setattr(count._obj, "value", world.gpus) or 0,
        rsmi_shut_down=lambda: 0,
    )
    stand_in = types.SimpleNamespace(
        CDLL=lambda path: smi, c_uint32=ctypes.c_uint32, c_uint64=ctypes.c_uint64, byref=ctypes.byref
    )
    monkeypatch.setattr("kvbaton.transport.fabric.mori.guards.ctypes", stand_in)
    return world
