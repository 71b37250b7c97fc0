"""The whole world: processes, connections, and what may still go wrong. It knows which steps lead out of a state."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from kvbaton.check.search.bounds import MANY, Bounds
from kvbaton.check.search.channel import DEAD, FENCED, JOINED, LOST, Channel, Link
from kvbaton.check.search.decode_process import DecodeProcess
from kvbaton.check.search.prefill_process import GONE, LIVE, REVOKED, PrefillProcess
from kvbaton.check.search.process import Event, LinkKey, Outcome
from kvbaton.check.search.table import Table

State = tuple[int, ...]
"""Numbers: the states of prefill processes, of decode processes and of connections, and what may still go wrong."""

FAULT, ABORT, REPEAT, FENCE = 1000, 100, 10, 1
"""What one of each costs of the last number of a state."""


DEADLINES = ("deadline", "unpark", "forget")
OPTIONAL = ("abort", "fail", "drain", "repeat", "cut")
"""Events that nothing waits for: where no other is left, the world is idle."""


class Step(NamedTuple):
    """One way out of a state."""

    label: Event
    state: State
    problem: str
    """The promise that it breaks; empty if none."""


class World:
    """All states within ``bounds``, found step by step."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.lives = frozenset(range(len(bounds.rooms)))
        self.prefills = [Table(PrefillProcess(bounds, rank)) for rank in range(bounds.prefills)]
        self.decodes = [Table(DecodeProcess(bounds, rank)) for rank in range(bounds.decodes)]
        self.tables: list[Table[PrefillProcess] | Table[DecodeProcess]] = [*self.prefills, *self.decodes]
        self.names = [f"prefill {rank}" for rank in range(bounds.prefills)]
        self.names += [f"decode {rank}" for rank in range(bounds.decodes)]
        self.pairs = list(itertools.product(range(bounds.prefills), range(bounds.decodes)))
        self.channels: list[Channel] = []
        self._channel_numbers: dict[Channel, int] = {}
        self._frames_added: dict[tuple[int, int, bytes, bool], int] = {}
        self._frames_taken: dict[tuple[int, int, bytes, bool], int] = {}
        self.first = self._begin()

    def _begin(self) -> State:
        state = [table.first for table in self.tables] + [self._number(Channel())] * len(self.pairs)
        bounds = self.bounds
        state.append(FAULT * bounds.faults + ABORT * bounds.aborts + REPEAT * bounds.repeats + FENCE * bounds.fences)
        for pair in range(len(self.pairs)):
            self._join(state, pair)
        return tuple(state)

    # Where the numbers of a state stand.

    def _decode_at(self, rank: int) -> int:
        return self.bounds.prefills + rank

    def _pair_at(self, pair: int) -> int:
        return len(self.tables) + pair

    def _pair_of(self, key: LinkKey) -> int:
        return key.prefill * self.bounds.decodes + key.decode

    def _number(self, channel: Channel) -> int:
        number = self._channel_numbers.get(channel)
        if number is None:
            number = self._channel_numbers[channel] = len(self.channels)
            self.channels.append(channel)
        return number

    # What may happen.

    def steps(self, state: State) -> list[Step]:
        """Every way out of ``state``."""
        steps: list[Step] = []
        idle = self.bounds.deadlines == "idle"
        for index, table in enumerate(self.tables):
            for event in table.seen[state[index]].events:
                if not (idle and event[0] in DEADLINES):
                    self._step_of_process(state, index, event, steps)
        for pair in range(len(self.pairs)):
            self._steps_of_pair(state, pair, steps)
        if idle and all(step.label[0] in OPTIONAL for step in steps):
            for index, table in enumerate(self.tables):
                for event in table.seen[state[index]].events:
                    if event[0] in DEADLINES:
                        self._step_of_process(state, index, event, steps)
        if state[-1] >= FAULT and self.bounds.deaths:
            steps += [self._death(state, index) for index in range(len(self.tables))]
        return steps

    def _step_of_process(self, state: State, index: int, event: Event, steps: list[Step]) -> None:
        word, budget, cost = event[0], state[-1], 0
        if word in ("open", "cancel"):
            if not self._may_begin(state, event[1]):
                return
        elif word == "drain":
            if budget % REPEAT == 0:
                return
            cost = FENCE
        elif word == "abort":
            if budget // ABORT % 10 == 0:
                return
            cost = ABORT if self.bounds.aborts < MANY else 0
        elif word == "fail" and not self._fails_freely(state, event):
            if budget < FAULT or not self.bounds.write_errors:
                return
            cost = FAULT
        after = list(state)
        after[-1] -= cost
        problem = self._perform(after, index, event)
        steps.append(Step((word, self.names[index], *event[1:]), tuple(after), problem))

    def _steps_of_pair(self, state: State, pair: int, steps: list[Step]) -> None:
        prefill, decode = self.pairs[pair]
        channel = self.channels[state[self._pair_at(pair)]]
        budget = state[-1]
        for link in channel.links:
            key = LinkKey(prefill, decode, link.number)
            for to_prefill, frames in ((True, link.to_prefill), (False, link.to_decode)):
                for frame in dict.fromkeys(frames):
                    steps.append(self._delivery(state, pair, key, frame, to_prefill, False))
                    if budget // REPEAT % 10:
                        steps.append(self._delivery(state, pair, key, frame, to_prefill, True))
            if link.up:
                if budget >= FAULT and self.bounds.cuts:
                    steps.append(self._change(state, pair, ("cut", key), link._replace(up=False), FAULT))
                continue
            if link.prefill == JOINED:
                steps.append(self._notice(state, pair, key, link.with_prefill(LOST), "prefill"))
            if link.decode == JOINED:
                steps.append(self._notice(state, pair, key, link.with_decode(LOST), "decode"))
            elif link.decode == LOST:
                steps.append(self._fence(state, pair, key, link))
        over = not channel.links or channel.links[-1].decode != JOINED
        if over and len(self.decodes[decode].seen[state[self._decode_at(decode)]].begun) < len(self.lives):
            after = list(state)
            self._join(after, pair)
            steps.append(Step(("join", LinkKey(prefill, decode, channel.opened + 1)), tuple(after), ""))

    def _may_begin(self, state: State, life: int) -> bool:
        """Whether the room number of ``life`` is free: every rank has closed the life before."""
        before = self.bounds.before(life)
        return before is None or all(
            before in table.seen[at].over for table, at in zip(self.tables, state, strict=False)
        )

    def _fails_freely(self, state: State, event: Event) -> bool:
        """Whether a write may fail without a fault of its own: its connection is gone."""
        link = self.channels[state[self._pair_at(self._pair_of(event[1]))]].link(event[1].number)
        return link is None or not link.up

    # Steps.

    def _delivery(self, state: State, pair: int, key: LinkKey, frame: bytes, to_prefill: bool, keep: bool) -> Step:
        after = list(state)
        if keep:
            after[-1] -= REPEAT
        else:
            at = self._pair_at(pair)
            asked = (state[at], key.number, frame, to_prefill)
            taken = self._frames_taken.get(asked)
            if taken is None:
                channel = self.channels[state[at]]
                link = channel.link(key.number)
                assert link is not None
                taken = self._number(channel.with_link(link.without_frame(frame, to_prefill)))
                self._frames_taken[asked] = taken
            after[at] = taken
        index = key.prefill if to_prefill else self._decode_at(key.decode)
        problem = self._perform(after, index, ("deliver", key, frame))
        return Step(("repeat" if keep else "deliver", key, frame, to_prefill), tuple(after), problem)

    def _change(self, state: State, pair: int, label: Event, link: Link, cost: int = 0) -> Step:
        after = list(state)
        after[-1] -= cost
        self._put(after, pair, link)
        return Step(label, tuple(after), "")

    def _notice(self, state: State, pair: int, key: LinkKey, link: Link, side: str) -> Step:
        after = list(state)
        self._put(after, pair, link)
        index = key.prefill if side == "prefill" else self._decode_at(key.decode)
        problem = self._perform(after, index, ("lost", key))
        return Step(("lost", key, side), tuple(after), problem)

    def _fence(self, state: State, pair: int, key: LinkKey, link: Link) -> Step:
        after = list(state)
        problem = self._perform(after, key.prefill, ("settle", key, REVOKED))
        self._put(after, pair, link.with_decode(FENCED))
        problem = problem or self._perform(after, self._decode_at(key.decode), ("fenced", key))
        return Step(("fenced", key), tuple(after), problem)

    def _death(self, state: State, index: int) -> Step:
        after = list(state)
        after[-1] -= FAULT
        is_prefill = index < self.bounds.prefills
        writes = self.tables[index].seen[state[index]].writes
        problem = self._perform(after, index, ("die",))
        for pair, (prefill, decode) in enumerate(self.pairs):
            if index != (prefill if is_prefill else self._decode_at(decode)):
                continue
            for link in self.channels[after[self._pair_at(pair)]].links:
                key = LinkKey(prefill, decode, link.number)
                if is_prefill:
                    orphans = {life for at, life, fate in writes if at == key and fate == LIVE}
                    dead = link.with_prefill(DEAD)._replace(orphans=tuple(sorted({*link.orphans, *orphans})))
                else:
                    dead = link.with_decode(DEAD)
                    problem = problem or self._perform(after, prefill, ("settle", key, GONE))
                self._put(after, pair, dead)
        return Step(("die", self.names[index]), tuple(after), problem)

    def _join(self, after: list[int], pair: int) -> None:
        at = self._pair_at(pair)
        channel = self.channels[after[at]].joined()
        after[at] = self._number(channel)
        prefill, decode = self.pairs[pair]
        key = LinkKey(prefill, decode, channel.opened)
        for index in (prefill, self._decode_at(decode)):
            problem = self._perform(after, index, ("joined", key))
            assert not problem, problem

    # What a step does.

    def _put(self, after: list[int], pair: int, link: Link) -> None:
        at = self._pair_at(pair)
        after[at] = self._number(self.channels[after[at]].with_link(link))

    def _perform(self, after: list[int], index: int, event: Event) -> str:
        """Let an event happen in one process, and what it does in the rest of the world; says what it breaks."""
        outcome = self.tables[index].perform(after[index], event)
        after[index] = outcome.state
        to_prefill = index >= self.bounds.prefills
        for key, frame in outcome.sends:
            at = self._pair_at(self._pair_of(key))
            asked = (after[at], key.number, frame, to_prefill)
            added = self._frames_added.get(asked)
            if added is None:
                channel = self.channels[after[at]]
                link = channel.link(key.number)
                added = self._number(channel.with_link(link.with_frame(frame, to_prefill)) if link else channel)
                self._frames_added[asked] = added
            after[at] = added
        if outcome.problem:
            return outcome.problem
        return self._consequences(after, index, outcome) if outcome.reaches_out else ""

    def _consequences(self, after: list[int], index: int, outcome: Outcome) -> str:
        for key, life in outcome.started:
            link = self.channels[after[self._pair_at(self._pair_of(key))]].link(key.number)
            if link is None or link.decode in (FENCED, DEAD):
                fate = REVOKED if link and link.decode == FENCED else GONE
                self._perform(after, key.prefill, ("settle", key, fate))
            elif life not in self._held(after, key.decode):
                return f"a write of part {key.prefill} to life {life} began, and its rows had been given back"
        for key, event in outcome.landed:
            problem = self._perform(after, self._decode_at(key.decode), event)
            if problem:
                return problem
        for life in outcome.released:
            problem = self._release(after, index - self.bounds.prefills, life)
            if problem:
                return problem
        for key in outcome.cut:
            link = self.channels[after[self._pair_at(self._pair_of(key))]].link(key.number)
            if link is not None:
                self._put(after, self._pair_of(key), link._replace(up=False))
        return ""

    def _held(self, state: list[int], decode: int) -> frozenset[int]:
        return self.decodes[decode].seen[state[self._decode_at(decode)]].held

    def _release(self, state: list[int], decode: int, life: int) -> str:
        for prefill in range(self.bounds.prefills):
            writes = self.prefills[prefill].seen[state[prefill]].writes
            if any(key.decode == decode and target == life and fate == LIVE for key, target, fate in writes):
                return f"the rows of life {life} were given back while a write of part {prefill} is under way"
            channel = self.channels[state[self._pair_at(prefill * self.bounds.decodes + decode)]]
            if any(life in link.orphans for link in channel.links):
                return f"the rows of life {life} were given back while a write of the dead part {prefill} can land"
        return ""

    # Where nothing happens any more.

    def problem_at_rest(self, state: State) -> str:
        """What is wrong with a state that no step leads out of; empty if all is well."""
        for index, table in enumerate(self.tables):
            seen, name = table.seen[state[index]], self.names[index]
            if seen.left_over:
                return f"{name}: {seen.left_over}"
            if seen.writes:
                return f"{name}: {len(seen.writes)} writes never ended"
            if seen.over != self.lives:
                return f"{name}: lives {sorted(self.lives - seen.over)} never ended"
        return ""
