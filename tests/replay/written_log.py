"""A log in the making: each event gets the next sequence and a later time; facts that are owed wait until they are said."""

from __future__ import annotations

import random
from typing import Any

from schemas.config import Config
from schemas.envelope import Event
from tests.scheduler.world import RUN

_START_US = 1_000_000_000


class WrittenLog:
    """`log` is the run so far. A subclass plays a part of the world: its `_on_KIND` owes what follows an event of that kind."""

    def __init__(self, rng: random.Random, config: Config) -> None:
        self.rng, self.config = rng, config
        self.log: list[Event] = []
        self._owed: list[Event] = []
        """Facts that the world may say next; their place in the log is not known yet."""
        self._now_us = _START_US
        self._over = False
        """The run is finished."""
        self._epochs: dict[str, int] = {}
        """Of each cell that changed its role."""

    def _say(
        self,
        owner: str,
        kind: str,
        entity: str,
        data: Any,
        *,
        cause: Event | None = None,
        id: str = "",
        instance: str = "",
    ) -> Event:
        self._now_us += self.rng.randrange(1, 200_000)
        seq = len(self.log) + 1
        event = Event(
            seq=seq,
            time_us=self._now_us,
            kind=kind,
            entity=entity,
            owner=owner,
            instance=instance or owner,
            causation=cause.seq if cause else 0,
            id=id or f"{cause.id if cause else RUN}.{entity}.{kind}.{seq}",
            data=data,
        )
        self.log.append(event)
        self._answer(event)
        return event

    def _owe(
        self, owner: str, kind: str, entity: str, data: Any, cause: Event | None = None, instance: str = ""
    ) -> None:
        self._owed.append(
            Event(
                seq=0,
                time_us=0,
                kind=kind,
                entity=entity,
                owner=owner,
                instance=instance or owner,
                causation=cause.seq if cause else 0,
                id=cause.id if cause else RUN,
                data=data,
            )
        )

    def _instead(self, owed: Event, kind: str, data: Any) -> Event:
        return Event(
            seq=0,
            time_us=0,
            kind=kind,
            entity=owed.entity,
            owner=owed.owner,
            instance=owed.instance,
            causation=owed.causation,
            id=owed.id,
            data=data,
        )

    def _answer(self, event: Event) -> None:
        answer = getattr(self, "_on_" + event.kind.replace(".", "_").replace("-", "_"), None)
        if answer is not None:
            answer(event, event.data)
