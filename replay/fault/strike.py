"""The faults of a plan, let loose on a mesh at their moments; those that struck are written down."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import singledispatchmethod
from typing import Any

import msgspec

from replay.fault import plan as p
from replay.fault.mesh import Member, Mesh
from replay.fault.setting import RUN
from replay.fault.trouble import Awaited, Trouble
from replay.virtual.network import USUAL, Fate
from replay.worlds.disk import DAMAGED
from replay.worlds.training import swapped
from replay.worlds.world import CHECKPOINTS
from schemas import streams
from schemas.envelope import Event
from schemas.errors import ConfigError
from services.mesh.clock import MICROSECONDS
from services.trainer.batch_view import CORE

_BECOMES: dict[str, Callable[[Any], Any] | None] = {"garbled": lambda _: DAMAGED, "gone": None, "swapped": swapped}
"""What becomes of what lies in a checkpoint."""
_UNREADABLE = (hashlib.sha256(b"another code's").hexdigest(), b"another code's")
"""A blob: whole, and no snapshot."""
REMOUNT_S = 1.0
"""How long the event bus is away when it is started again with room on its disk."""


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that struck."""

    place: int
    """Its place in the plan."""
    at_s: float
    """Virtual seconds since the beginning."""
    seq: int
    """Last sequence of LOG then."""


class Striker:
    """`begin` once; everything else follows from what the log says."""

    def __init__(self, mesh: Mesh, plan: p.Plan) -> None:
        self._mesh, self._plan = mesh, plan
        self.struck: list[Struck] = []
        self._counts: Counter[str] = Counter()
        self._pinned: dict[tuple[str, int], list[int]] = defaultdict(list)
        for place, fault in enumerate(plan.faults):
            self._pinned[fault.pin.kind, fault.pin.nth if fault.pin.kind else 0].append(place)
        self._troubles = {name: Trouble(member, later=self.later, note=self.note) for name, member in mesh.members.items()}
        self._requests: list[Awaited[p.Request]] = []

    def begin(self) -> None:
        for name, inputs in self._plan.snapshot_every.items():
            self._member(name).snapshot_every = inputs
        self._mesh.watchers.append(self._see)
        self._due("", 0)

    def note(self, place: int) -> None:
        """A fault struck."""
        log = self._mesh.broker.stream(streams.log_stream(RUN))
        at_s = round(self._mesh.loop.time(), 6)
        self.struck.append(Struck(place=place, at_s=at_s, seq=len(log.messages)))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Outside of all lives, so many virtual seconds from now."""
        self._mesh.later(seconds, act)

    def _see(self, event: Event) -> None:
        self._counts[event.kind] += 1
        self._due(event.kind, self._counts[event.kind])

    def _due(self, kind: str, nth: int) -> None:
        for place in self._pinned.pop((kind, nth), ()):
            fault = self._plan.faults[place]
            self.later(fault.pin.after_s, lambda place=place, fault=fault: self._strike(fault, place))  # type: ignore[misc]

    def _member(self, name: str) -> Member:
        member = self._mesh.members.get(name)
        if member is None:
            known = ", ".join(self._mesh.members)
            raise ConfigError(f"no service is called {name!r} in this run", remedy=f"choose from {known}")
        return member

    @singledispatchmethod
    def _strike(self, fault: p.AnyFault, place: int) -> None:
        raise NotImplementedError(type(fault).__name__)

    @_strike.register
    def _crash(self, fault: p.Crash, place: int) -> None:
        member = self._member(fault.service)

        def kill() -> None:
            if member.kill(down_s=fault.down_s):
                self.note(place)

        member.strike(fault.steps, kill)

    @_strike.register
    def _stop(self, fault: p.Stop, place: int) -> None:
        member = self._member(fault.service)

        def stop() -> None:
            if member.stop(down_s=fault.down_s):
                self.note(place)

        member.strike(fault.steps, stop)

    @_strike.register
    def _hung(self, fault: p.Hung, place: int) -> None:
        member = self._member(fault.service)

        def hang() -> None:
            if member.hang(fault.seconds, killed=fault.killed):
                self.note(place)

        member.strike(fault.steps, hang)

    @_strike.register
    def _damaged_checkpoint(self, fault: p.DamagedCheckpoint, place: int) -> None:
        disk = self._mesh.world.disks[CHECKPOINTS]
        saved = sorted(disk.folders)
        if fault.behind >= len(saved) or not self._member(f"trainer-{CORE}").kill(down_s=fault.down_s):
            return
        self.note(place)
        folder = saved[-1 - fault.behind]
        if disk.damage(folder, _BECOMES[fault.how]):
            self.later(fault.seconds, lambda: disk.mend(folder))

    @_strike.register
    def _damaged_snapshot(self, fault: p.DamagedSnapshot, place: int) -> None:
        member, name = self._member(fault.service), streams.snapshot_blob(fault.service)
        blobs = self._mesh.broker.bucket(streams.blob_bucket(RUN))
        known = blobs.get(name)

        def damage(now: tuple[str, bytes] | None) -> None:
            if known is None or not member.kill(down_s=fault.down_s):
                return
            self.note(place)
            if now is None:
                del blobs[name]
            else:
                blobs[name] = now

        if fault.how == "old":
            self.later(fault.seconds, lambda: damage(known))
        elif known is not None:
            digest, data = known
            damage({"garbled": (digest, data[::-1]), "gone": None, "unreadable": _UNREADABLE}[fault.how])

    @_strike.register
    def _host_disk_full(self, fault: p.HostDiskFull, place: int) -> None:
        disk = self._mesh.world.disks[CHECKPOINTS if fault.where == "checkpoints" else ""]
        if disk.full:
            return
        self.note(place)
        disk.full = True

        def free() -> None:
            disk.full = False
            self._mesh.stir()

        self.later(fault.seconds, free)

    @_strike.register
    def _host_lost(self, fault: p.HostLost, place: int) -> None:
        if self._mesh.lose_host(fault.host, down_s=fault.down_s):
            self.note(place)

    @_strike.register
    def _doubt(self, fault: p.Doubt, place: int) -> None:
        self._trouble(fault.service).doubt(fault, place)

    @_strike.register
    def _last_words(self, fault: p.LastWords, place: int) -> None:
        self._trouble(fault.service).doubt(fault, place)

    @_strike.register
    def _delivery(self, fault: p.Delivery, place: int) -> None:
        self._trouble(fault.service).misdeliver(fault, place)

    @_strike.register
    def _disconnected(self, fault: p.Disconnected, place: int) -> None:
        bus = self._member(fault.service).bus
        if bus is None or bus.closed or not bus.up:
            return
        self.note(place)
        bus.disconnect()

        def reconnect() -> None:
            if not bus.up and self._mesh.broker.up:
                bus.reconnect()
                self._mesh.stir()

        self.later(fault.seconds, reconnect)

    @_strike.register
    def _slow_reader(self, fault: p.SlowReader, place: int) -> None:
        self.note(place)
        self._trouble(fault.service).lag(fault)

    @_strike.register
    def _server_restart(self, fault: p.ServerRestart, place: int) -> None:
        if self._mesh.broker.up:
            self.note(place)
            self._restart(fault.down_s)

    @_strike.register
    def _disk_full(self, fault: p.DiskFull, place: int) -> None:
        broker = self._mesh.broker
        if not broker.up or broker.full:
            return
        self.note(place)
        broker.fill()

        def mend() -> None:
            if broker.up and broker.full:
                self._restart(REMOUNT_S)

        self.later(fault.seconds, mend)

    def _restart(self, down_s: float) -> None:
        broker = self._mesh.broker
        broker.stop()

        def start() -> None:
            broker.start()
            self._mesh.stir()

        self.later(down_s, start)

    @_strike.register
    def _clock_jump(self, fault: p.ClockJump, place: int) -> None:
        clock = self._mesh.clock if fault.who == "server" else self._member(fault.who).clock
        clock.off_us += round(fault.by_s * MICROSECONDS)
        self._mesh.held_up_s += max(0.0, -fault.by_s)
        self.note(place)

    @_strike.register
    def _request(self, fault: p.Request, place: int) -> None:
        self._requests.append(Awaited(fault, place, fault.nth, 1))
        self._mesh.network.fate = self._request_fate

    def _request_fate(self, url: str, path: str) -> Fate:
        for awaited in self._requests:
            fault = awaited.fault
            if fault.path == path and awaited.comes():
                self._requests.remove(awaited)
                self.note(awaited.place)
                return Fate(slow_s=fault.slow_s, late_s=fault.late_s, twice=fault.twice, cut=fault.cut)
        return USUAL

    @_strike.register
    def _engine(self, fault: p.EngineFault, place: int) -> None:
        engine = self._mesh.world.engines.get(fault.cell)
        if engine is None:
            return
        self.note(place)
        if fault.how == "dies":
            engine.die()
        elif fault.how == "hangs":
            engine.hang(fault.seconds)
        elif fault.how == "slow":
            engine.slow(fault.factor, fault.seconds)
        else:
            engine.abort_some(sys.maxsize)

    @_strike.register
    def _evaluator(self, fault: p.EvaluatorFault, place: int) -> None:
        self._mesh.world.next_tests.extend([fault.how] * fault.times)
        self.note(place)

    @_strike.register
    def _agent(self, fault: p.AgentFault, place: int) -> None:
        world = self._mesh.world
        if fault.how == "late":
            world.next_ends.append("late")
        else:
            world.next_requests.append(fault.how)
        self.note(place)

    @_strike.register
    def _paused(self, fault: p.Paused, place: int) -> None:
        self._wish(place, "run.paused", "run.resumed", RUN, fault.seconds)

    @_strike.register
    def _withdrawn(self, fault: p.Withdrawn, place: int) -> None:
        self._wish(place, "cell.withdrawn", "cell.reinstated", fault.cell, fault.seconds)

    def _wish(self, place: int, kind: str, undone: str, entity: str, seconds: float) -> None:
        def said() -> None:
            self.note(place)
            # Whoever waits for a place, or for the run to go on, waits so much longer.
            self._mesh.held_up_s += seconds

        self._mesh.operator.wish(kind, undone, entity, seconds=seconds, said=said)

    def _trouble(self, name: str) -> Trouble:
        self._member(name)
        return self._troubles[name]
