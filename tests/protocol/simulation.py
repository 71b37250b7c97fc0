"""A small world for both cores: a clock, a network, memory and engines, all driven by one seed.

Prefill and decode ranks are joined by links. A link delays, reorders and repeats messages, and loses them only by being
cut. Writes start at once, land after a while, and are reported later still; those of a cut link can land until it is
fenced. Every row stands for one life of one receiver, so that a write into rows that were given back is seen at once.
"""

import heapq
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import msgspec

from kvbaton.errors import DigestMismatch, RoomError
from kvbaton.layout import PAGED, SLOT, window
from kvbaton.protocol import (
    CheckDigests,
    ComponentNeed,
    Deadlines,
    DecodeCore,
    Deliver,
    FencePeer,
    PeerShare,
    PrefillCore,
    RoomChanged,
    Rows,
    RowsReleased,
    Send,
    SendDone,
    StartWrite,
    Status,
    decode,
    encode,
    rows_from_bytes,
    rows_to_bytes,
)
from kvbaton.protocol.failures import Failure

DEADLINES = Deadlines(offer_wait=60, transfer=40, drain=6, parked_offers=6, parked_seconds=20)
WINDOW = 8


@dataclass(frozen=True)
class Faults:
    """Probabilities of what can go wrong."""

    repeat: float = 0.0
    cut: float = 0.0
    death: float = 0.0
    abort: float = 0.0
    write_error: float = 0.0
    slow_write: float = 0.0
    wrong_tokens: float = 0.0
    lost_chunk: float = 0.0
    never_finish: float = 0.0
    wrong_digest: float = 0.0


CALM = Faults()
STORM = Faults(repeat=0.1, cut=0.02, death=0.05, abort=0.15, write_error=0.02, slow_write=0.1, wrong_digest=0.02)
SLIPS = Faults(repeat=0.1, wrong_tokens=0.05, lost_chunk=0.1, never_finish=0.05)
"""Engines that do not keep their word."""


@dataclass
class Link:
    """One connection; its key is the same word on both sides, and is used once."""

    key: str
    prefill: int
    decode: int
    up: bool = True
    fenced: bool = False
    writes: list = field(default_factory=list)

    def fence(self):
        """Whatever is still under way ends without landing."""
        self.fenced = True
        for land in self.writes:
            land()
        self.writes.clear()


@dataclass
class Life:
    """One use of a room number on one rank."""

    number: int
    room: int
    rank: int
    status: Status = Status.WAITING
    released: bool = False
    closed: bool = False
    tokens: int = 0
    prefix: int = 0
    landed: dict = field(default_factory=lambda: defaultdict(set))
    origins: dict = field(default_factory=lambda: defaultdict(set))
    in_flight: int = 0
    readers: int = 0
    delivered: list = field(default_factory=list)


class World:
    """Everything that one seed makes happen. `run` ends with all invariants checked, or an assertion."""

    def __init__(self, seed, faults=STORM, prefills=2, decodes=2, rooms=4, generations=5):
        self.random = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.events = []
        self.numbers = itertools.count()
        self.rooms, self.generations = range(rooms), generations
        self.prefills = [PrefillCore(DEADLINES) for _ in range(prefills)]
        self.decodes = [DecodeCore(DEADLINES) for _ in range(decodes)]
        self.shares = self._make_shares(prefills, decodes)
        self.links = {}
        self.current = {}
        self.lives = {}
        self.lives_of = {}
        self.handles = {}
        self.outcomes = Counter()
        self.faults_on = True
        for prefill, decode_rank in itertools.product(range(prefills), range(decodes)):
            self._connect(prefill, decode_rank)

    def _make_shares(self, prefills, decodes):
        kinds = {"kv": ComponentNeed(PAGED), "swa": ComponentNeed(window(WINDOW)), "gdn": ComponentNeed(SLOT)}
        shares = {}
        for destination in range(decodes):
            chosen = [[name for name in kinds if self.random.random() < 0.6] for _ in range(prefills)]
            parts = [part for part, names in enumerate(chosen) if names] or [0]
            for part, names in enumerate(chosen):
                shares[part, destination] = (
                    PeerShare(
                        {name: kinds[name] for name in names},
                        destination,
                        decodes,
                        part,
                        sends=part in parts,
                        carries_aux=part == parts[0],
                        writes_aux=part == parts[0] and self.random.random() < 0.5,
                    ),
                    parts,
                )
        return shares

    # The clock.

    def after(self, longest, event):
        heapq.heappush(self.events, (self.now + self.random.uniform(0, longest), next(self.numbers), event))

    def chance(self, name):
        return self.faults_on and self.random.random() < getattr(self.faults, name)

    def step(self):
        deadlines = [core.next_deadline() for core in (*self.prefills, *self.decodes)]
        times = [when for when in (*deadlines, self.events[0][0] if self.events else None) if when is not None]
        if not times:
            return False
        self.now = max(self.now, min(times))
        if self.events and self.events[0][0] <= self.now:
            heapq.heappop(self.events)[2]()
        for rank, core in enumerate(self.prefills):
            self.perform_prefill(rank, core.tick(self.now))
        for rank, core in enumerate(self.decodes):
            self.perform_decode(rank, core.tick(self.now))
        self.check()
        return True

    # The network.

    def _connect(self, prefill, decode_rank):
        link = Link(f"{prefill}-{decode_rank}#{next(self.numbers)}", prefill, decode_rank)
        self.links[link.key] = link
        self.current[prefill, decode_rank] = link
        share, parts = self.shares[prefill, decode_rank]
        self.prefills[prefill].peer_joined(link.key, share)
        self.decodes[decode_rank].peer_joined(link.key, prefill, parts)

    def cut(self, link):
        if not link.up:
            return
        link.up = False
        prefill, receiver = self.prefills[link.prefill], self.decodes[link.decode]
        reason = f"link {link.key} was cut"
        self.after(
            3, lambda: self.perform_prefill(link.prefill, prefill.peer_lost(link.key, reason, self.now), prefill)
        )

        def lost():
            self.perform_decode(link.decode, receiver.peer_lost(link.key, reason, self.now), receiver)
            self.after(10, fenced)

        def fenced():
            link.fence()
            self.perform_decode(link.decode, receiver.peer_fenced(link.key, self.now), receiver)
            if self.current[link.prefill, link.decode] is link:
                self._connect(link.prefill, link.decode)

        self.after(3, lost)

    def send(self, link, message, to_prefill):
        frame = encode(message)
        self.after(3, lambda: self.arrive(link, frame, to_prefill))
        if self.chance("repeat"):
            self.after(40, lambda: self.arrive(link, frame, to_prefill))
        if self.chance("cut"):
            self.cut(link)

    def arrive(self, link, frame, to_prefill):
        if not link.up:
            return
        (message,) = decode(frame)
        if to_prefill:
            self.perform_prefill(link.prefill, self.prefills[link.prefill].handle(link.key, message, self.now))
        else:
            self.perform_decode(link.decode, self.decodes[link.decode].handle(link.key, message, self.now))

    def die(self, side, rank):
        """A process is replaced by a new one; what it had posted may still land."""
        for link in list(self.links.values()):
            if (link.prefill if side == "prefill" else link.decode) == rank:
                self.cut(link)
        if side == "prefill":
            self.prefills[rank] = PrefillCore(DEADLINES)
        else:
            self.decodes[rank] = DecodeCore(DEADLINES)
        for key in [key for key in self.lives_of if key[:2] == (side, rank)]:
            self.lives_of.pop(key).closed = True
        for link in list(self.current.values()):
            if (link.prefill if side == "prefill" else link.decode) == rank:
                self._connect(link.prefill, link.decode)

    # The drivers of the cores.

    def perform_prefill(self, rank, actions, core=None):
        core = core or self.prefills[rank]
        for action in actions:
            if isinstance(action, Send):
                self.send(self.links[action.peer], action.message, to_prefill=False)
            elif isinstance(action, SendDone):
                done = msgspec.structs.replace(action.done, aux=b"aux") if action.aux else action.done
                self.send(self.links[action.peer], done, to_prefill=False)
            elif isinstance(action, StartWrite):
                self.start_write(rank, core, action)
            elif core is self.prefills[rank]:
                self.note("prefill", rank, action)

    def perform_decode(self, rank, actions, core=None):
        core = core or self.decodes[rank]
        for action in actions:
            if isinstance(action, Send):
                self.send(self.links[action.peer], action.message, to_prefill=True)
            elif isinstance(action, FencePeer):
                self.cut(self.links[action.peer])
            elif isinstance(action, CheckDigests):
                self.compare(rank, core, action)
            elif core is self.decodes[rank]:
                self.note("decode", rank, action)

    def compare(self, rank, core, action):
        """The rows of a room are read for a while, to see whether they have the right digests."""
        life = self.lives_of["decode", rank, action.room]
        assert not life.released, f"rows of room {life.room} are read after their release"
        life.readers += 1
        failure = Failure(DigestMismatch, "another digest") if self.chance("wrong_digest") else None

        def compared():
            life.readers -= 1
            self.perform_decode(rank, core.checked(action, failure, self.now), core)

        self.after(25 if self.chance("slow_write") else 4, compared)

    def note(self, side, rank, action):
        life = self.lives_of[side, rank, action.room]
        if isinstance(action, Deliver):
            assert not life.status.terminal
            life.delivered.append((action.part, action.done.aux))
        elif isinstance(action, RowsReleased):
            assert not life.released, "rows were released twice"
            life.released = True
            if side == "decode":
                assert life.in_flight == 0, f"rows of room {life.room} were released under a write"
                assert life.readers == 0, f"rows of room {life.room} were released while they were read"
        elif isinstance(action, RoomChanged):
            assert not life.status.terminal, f"a room in {life.status} changed to {action.status}"
            life.status = action.status
            if action.status is Status.SUCCESS and side == "decode":
                self.check_complete(life)
            if action.status.terminal:
                self.outcomes[side, action.status] += 1
                self.after(8, lambda: self.close(side, rank, life))

    def start_write(self, rank, core, action):
        assert action.pieces or action.slots or action.aux
        link = self.links[action.peer]
        offer = core.offer(action.room, action.peer)
        assert offer.epoch == action.epoch
        targets = {int(rows_from_bytes(offer.components[name].rows)[0]) for name in (*action.pieces, *action.slots)}
        if action.aux:
            targets.add(offer.aux_row)
        (target,) = targets
        life = self.lives[target]
        if not link.fenced:
            assert not life.released, f"a write to room {life.room} began after its rows were released"
        life.in_flight += 1
        error = "broken" if self.chance("write_error") else ""
        over = []

        def land():
            if over:
                return
            over.append(True)
            life.in_flight -= 1
            lost = link.fenced or error
            if not lost:
                assert not life.released or life.closed, (
                    f"a write landed in rows of room {life.room} after their release"
                )
                for name, (first, last) in action.pieces.items():
                    assert first < last
                    life.landed[link.prefill, name].update(range(first, last))
                for name in action.slots:
                    life.landed[link.prefill, name].add("slot")
                if action.aux:
                    assert self.shares[link.prefill, link.decode][0].writes_aux
                    life.landed[link.prefill, "aux"].add("row")
                life.origins[link.prefill].add(self.handles[action.handle])
            self.after(
                4,
                lambda: self.perform_prefill(rank, core.written(action.ticket, "lost" if lost else "", self.now), core),
            )

        self.after(25 if self.chance("slow_write") else 4, land)
        link.writes.append(land)
        if link.fenced:
            link.fence()

    # The engines.

    def close(self, side, rank, life):
        if life.closed:
            return
        core = self.prefills[rank] if side == "prefill" else self.decodes[rank]
        if side == "prefill":
            self.perform_prefill(rank, core.close(life.room, self.now))
        else:
            self.perform_decode(rank, core.close(life.room, self.now))
        life.closed = True

    def open(self, side, rank, room):
        core = self.prefills[rank] if side == "prefill" else self.decodes[rank]
        before = self.lives_of.get((side, rank, room))
        if before is not None and not before.closed:
            self.must_be_refused(core, side, rank, room)
            return None
        life = Life(next(self.numbers), room, rank)
        if before is not None and not before.released:
            self.must_be_refused(core, side, rank, room)
            return None
        self.lives[life.number] = self.lives_of[side, rank, room] = life
        if side == "prefill":
            self.perform_prefill(rank, core.open(room, self.now))
        else:
            peers = [self.current[prefill, rank].key for prefill in range(len(self.prefills))]
            self.perform_decode(rank, core.open(room, peers, self.now))
        return life

    def must_be_refused(self, core, side, rank, room):
        try:
            core.open(room, self.now) if side == "prefill" else core.open(room, [], self.now)
        except RoomError:
            return
        raise AssertionError(f"{side} {rank} opened room {room} twice")

    def start_generation(self, room):
        tokens = self.random.choice([0, 1, 5, 16, 40])
        prefix = self.random.choice([0, 0, tokens // 2, tokens])
        for rank in range(len(self.prefills)):
            self.after(6, lambda rank=rank: self.start_sender(rank, room, tokens))
        for rank in range(len(self.decodes)):
            self.after(6, lambda rank=rank: self.start_receiver(rank, room, tokens, prefix))

    def start_sender(self, rank, room, tokens):
        life = self.open("prefill", rank, room)
        if life is None:
            return
        if self.chance("wrong_tokens"):
            tokens += 1
        cuts = sorted(self.random.randrange(tokens + 1) for _ in range(self.random.randrange(3)))
        chunks = list(itertools.pairwise([0, *cuts, tokens]))
        *early, last = chunks
        self.random.shuffle(early)
        if early and self.chance("lost_chunk"):
            early.pop()
        self.send_next(rank, life, early, last, tokens)
        self.maybe_abort("prefill", rank, life)

    def send_next(self, rank, life, early, last, tokens):
        def go():
            if life.closed:
                return
            handle = next(self.numbers)
            self.handles[handle] = life.number
            core = self.prefills[rank]
            ranges = dict.fromkeys(("kv", "swa"), early[0] if early else last)
            if not early and self.chance("never_finish"):
                return
            if early:
                self.perform_prefill(rank, core.submit(life.room, handle, ranges, self.now))
                self.send_next(rank, life, early[1:], last, tokens)
            else:
                self.perform_prefill(rank, core.finish(life.room, handle, tokens, ranges, {"gdn"}, True, self.now))

        self.after(5, go)

    def start_receiver(self, rank, room, tokens, prefix):
        life = self.open("decode", rank, room)
        if life is None:
            return
        life.tokens, life.prefix = tokens, prefix
        digest = self.random.random() < 0.5

        def offer():
            if life.closed:
                return
            rows = Rows(rows_to_bytes([life.number]))
            actions = self.decodes[rank].offer(
                room,
                dict.fromkeys(("kv", "swa", "gdn"), rows),
                tokens,
                self.now,
                prefix=prefix,
                aux_row=life.number,
                digest=digest,
            )
            self.perform_decode(rank, actions)
            self.maybe_abort("decode", rank, life, 2)

        self.after(6, offer)
        self.maybe_abort("decode", rank, life)

    def maybe_abort(self, side, rank, life, longest=15):
        if not self.chance("abort"):
            return

        def abort():
            if life.closed:
                return
            if side == "prefill":
                self.perform_prefill(rank, self.prefills[rank].abort(life.room, "asked for", self.now))
            else:
                self.perform_decode(rank, self.decodes[rank].abort(life.room, "asked for", self.now))

        self.after(longest, abort)

    # What must always hold.

    def check(self):
        for (side, rank, room), life in self.lives_of.items():
            core = self.prefills[rank] if side == "prefill" else self.decodes[rank]
            if not life.closed:
                assert core.status(room) is life.status
            assert core.rows_released(room) == (life.released or (life.closed and core.rows_released(room)))
            if side == "decode" and life.in_flight:
                assert not life.released, f"room {room} was released with {life.in_flight} writes under way"

    def check_complete(self, life):
        for prefill in range(len(self.prefills)):
            share, parts = self.shares[prefill, life.rank]
            for name, need in share.components.items():
                first = max(life.prefix, life.tokens - need.kind.window) if need.kind.window else life.prefix
                wanted = set(range(first, life.tokens)) if need.kind.has_tokens else {"slot"}
                assert life.landed[prefill, name] == wanted, f"room {life.room}, part {prefill}, {name}: not all there"
            assert len(life.origins[prefill]) <= 1, "data of two lives of the sender were mixed"
            assert sorted(part for part, _ in life.delivered) == sorted(parts)
        in_done = [part for part, aux in life.delivered if aux]
        written = [prefill for (prefill, name), rows in life.landed.items() if name == "aux" and rows]
        by_write = self.shares[parts[0], life.rank][0].writes_aux
        assert (in_done, written) == (([], [parts[0]]) if by_write else ([parts[0]], []))

    # A whole run.

    def run(self):
        for _ in range(self.generations):
            for room in self.rooms:
                self.start_generation(room)
            self.run_until(self.now + self.random.uniform(10, 50) if self.faults is not CALM else None)
            if self.chance("death"):
                side = self.random.choice(["prefill", "decode"])
                self.die(side, self.random.randrange(len(self.prefills if side == "prefill" else self.decodes)))
        self.faults_on = False
        self.run_until(None)
        for life in self.lives_of.values():
            assert life.closed, f"room {life.room} never ended"
            assert life.released, f"the rows of room {life.room} never came back"
        for core in (*self.prefills, *self.decodes):
            sizes = core.table_sizes()
            sizes.pop("peers")
            sizes.pop("remembered", None)
            assert not any(sizes.values()), f"tables are not empty at the end: {sizes}"
        return self.outcomes

    def run_until(self, end):
        for _ in range(100_000):
            upcoming = self.events[0][0] if self.events else None
            if end is not None and (upcoming is None or upcoming > end):
                self.now = end
                return
            if not self.step():
                return
        raise AssertionError("the world does not come to rest")
