"""What a service has to suffer from its connection to the event bus: publishes without an answer, last words, messages that
come twice or not at all, and late ones.

Invariant: what strikes the n-th of something strikes it in whichever life that comes; a service without trouble takes the
short way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from replay.fault import plan as p
from replay.fault.mesh import Member
from services.mesh.bus import Stored
from services.mesh.memory_bus import MemoryBus, PublishFate, always_answered
from services.mesh.memory_reader import DeliveryFate, Line, always_once

F = TypeVar("F")
Later = Callable[[float, Callable[[], None]], None]


class Awaited(Generic[F]):
    """A fault that waits for the n-th of something, and takes `times` of them."""

    def __init__(self, fault: F, place: int, nth: int, times: int) -> None:
        self.fault, self.place = fault, place
        self._nth, self._times = nth, times

    @property
    def over(self) -> bool:
        return self._times == 0

    def comes(self) -> bool:
        """One more came; whether the fault takes it."""
        self._nth -= 1
        if self._nth > 0:
            return False
        self._times -= 1
        return True


class Trouble:
    """What one service has to suffer from its connection to the event bus, through all of its lives."""

    def __init__(self, member: Member, *, later: Later, note: Callable[[int], None]) -> None:
        self._member, self._later, self._note = member, later, note
        self._doubts: list[Awaited[p.Doubt | p.LastWords]] = []
        self._deliveries: list[Awaited[p.Delivery]] = []
        self._usual = member.line
        self._lagging = 0
        member.on_connect.append(self._connected)

    def doubt(self, fault: p.Doubt | p.LastWords, place: int) -> None:
        self._doubts.append(Awaited(fault, place, fault.nth, fault.times if isinstance(fault, p.Doubt) else 1))
        self._connected(self._member.bus)

    def misdeliver(self, fault: p.Delivery, place: int) -> None:
        self._deliveries.append(Awaited(fault, place, fault.nth, fault.times))
        self._connected(self._member.bus)

    def lag(self, fault: p.SlowReader) -> None:
        self._lagging += 1
        self._draw_line(msgspec.structs.replace(self._usual, delivery_s=fault.lag_s))

        def over() -> None:
            self._lagging -= 1
            if not self._lagging:
                self._draw_line(self._usual)

        self._later(fault.seconds, over)

    def _draw_line(self, line: Line) -> None:
        self._member.line = line
        if self._member.bus is not None:
            self._member.bus.line = line

    def _connected(self, bus: MemoryBus | None) -> None:
        # Whoever has no trouble takes the short way.
        if bus is not None:
            bus.publish_fate = (lambda subject, msg_id: self._publish_fate(bus)) if self._doubts else always_answered
            bus.delivery_fate = self._delivery_fate if self._deliveries else always_once

    def _publish_fate(self, bus: MemoryBus) -> PublishFate:
        for awaited in self._doubts:
            if not awaited.comes():
                continue
            if awaited.over:
                self._doubts.remove(awaited)
                self._connected(bus)
                self._note(awaited.place)
            return self._doubted(awaited.fault, bus)
        return PublishFate.ANSWERED

    def _doubted(self, fault: p.Doubt | p.LastWords, bus: MemoryBus) -> PublishFate:
        if isinstance(fault, p.LastWords):
            fate, down_s = PublishFate.LATE, fault.down_s
            # Not in the step in which it speaks: nobody kills himself.
            self._later(0.0, lambda: self._die(bus, down_s))
        else:
            fate = PublishFate(fault.fate)
        if fate is PublishFate.LATE:
            self._later(fault.late_s, lambda: _release(bus))
        return fate

    def _die(self, bus: MemoryBus, down_s: float) -> None:
        if self._member.bus is bus:
            self._member.kill(down_s=down_s)

    def _delivery_fate(self, stored: Stored) -> DeliveryFate:
        for awaited in self._deliveries:
            if not awaited.comes():
                continue
            if awaited.over:
                self._deliveries.remove(awaited)
                self._connected(self._member.bus)
                self._note(awaited.place)
            return DeliveryFate(awaited.fault.fate)
        return DeliveryFate.ONCE


def _release(bus: MemoryBus) -> None:
    bus.release_late()
