"""How a service says something: one publisher a process, with its fence.

Decisions and facts of a deciding service leave through one lock with an expected last sequence over everything that the
service says, so a second instance started by mistake loses and stops (Fenced). Other services publish without a fence:
their write-once facts expect that nothing was said before, and what they may say again is said as the next of all that
the service says, whichever of its processes. So nothing is published without an expected sequence: an attempt that is on its
way for however long is refused once another was stored, whether or not the server still knows its id; and what a dead process
said is refused once the next one has joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from schemas import streams
from schemas.errors import Conflict, Fenced
from schemas.events import ServiceJoined
from schemas.kinds import KINDS
from schemas.units import Value
from services.mesh import codec
from services.mesh.bus import Bus
from services.mesh.clock import Clock


async def newest_process(bus: Bus, run: str, instance: str) -> ServiceJoined | None:
    """What the process of this instance that started last said of itself; None when there was none."""
    owner = instance.partition("-cell-")[0]
    subject = streams.subject(run, owner, "service.joined", instance)
    found = await bus.last_for(streams.log_stream(run), subject)
    data = codec.decode(found).data if found is not None else None
    return data if isinstance(data, ServiceJoined) else None


def fenced(service: str, run: str, other: ServiceJoined | None) -> Fenced:
    where = f" at {other.url}, process {other.pid}" if other is not None else ""
    return Fenced(
        f"another instance of the {service} runs{where}",
        where=f"run {run}",
        remedy=f"a run has one {service}: end one of the two; this one ends now and looks again later",
    )


class Publisher:
    def __init__(self, *, bus: Bus, clock: Clock, run: str, owner: str, instance: str) -> None:
        self._bus, self._clock = bus, clock
        self.run, self.owner, self.instance = run, owner, instance
        self._lock = asyncio.Lock()
        self._fence: int | None = None

    async def take_fence(self) -> int:
        """From now on only this publisher may speak for the service. Returns the sequence of its last event, or 0."""
        last = await self._bus.last_for(streams.log_stream(self.run), streams.owner_filter(self.run, self.owner))
        self._fence = last.seq if last else 0
        return self._fence

    async def say(
        self,
        kind: str,
        entity: str,
        data: Value,
        *,
        id: str,
        causation: int = 0,
        claim: tuple[str, int] | None = None,
    ) -> int:
        """Publish one event; returns its sequence. Saying an id again changes nothing: at once, and later unless
        something else was said under its subject.

        `claim` is (subject filter, expected last sequence): Conflict when somebody else answered first. A write-once
        fact that was said with another id before is a Conflict too.
        """
        payload = codec.encode(
            id=id,
            run=self.run,
            kind=kind,
            entity=entity,
            owner=self.owner,
            instance=self.instance,
            causation=causation,
            data=data,
        )
        subject = streams.subject(self.run, self.owner, kind, entity)
        ce = codec.headers(
            id=id, run=self.run, kind=kind, entity=entity, owner=self.owner, time_us=self._clock.now_us()
        )
        log, own = streams.log_stream(self.run), streams.owner_filter(self.run, self.owner)

        async def attempt(scope: str, expected: int) -> int:
            return await self._bus.publish(
                log, subject, payload, msg_id=id, headers=ce, expect_last_subject=expected, expect_filter=scope
            )

        async with self._lock:
            if claim is not None:
                seq = await attempt(*claim)
            elif self._fence is not None:
                try:
                    seq = await attempt(own, self._fence)
                except Conflict:
                    other = await newest_process(self._bus, self.run, self.instance)
                    raise fenced(self.owner, self.run, other) from None
            elif KINDS[kind].once:
                seq = await attempt(subject, 0)
            else:
                seq = await self._say_next(subject, own, id, attempt)
            if self._fence is not None:
                self._fence = max(self._fence, seq)
        return seq

    async def _say_next(
        self, subject: str, own: str, id: str, attempt: Callable[[str, int], Awaitable[int]]
    ) -> int:
        log = streams.log_stream(self.run)
        while True:
            last = await self._bus.last_for(log, own)
            said = last if last is None or last.subject == subject else await self._bus.last_for(log, subject)
            if said is not None and said.msg_id == id:
                return said.seq
            try:
                return await attempt(own, last.seq if last is not None else 0)
            except Conflict:
                # Somebody spoke in between: another instance, or an earlier process of ours that is heard late.
                continue
