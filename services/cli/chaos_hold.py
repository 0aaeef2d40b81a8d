"""What chaos does to a run that gets too far ahead of its kills: it is paused, and goes on when they have caught up.

Invariants: a run that somebody else paused is neither paused again nor let go; each pause of ours is followed by one
`run.resumed`, unless the run is over.
"""

from __future__ import annotations

from schemas.envelope import Event
from schemas.events import RunPaused, RunResumed
from services.mesh.publisher import Publisher

CHAOS = "chaos"
"""Who holds a run back, in `run.paused` and `run.resumed`."""


class Hold:
    """Told of the run's events by `observe`; `take` and `release` may be asked for again and again."""

    def __init__(self) -> None:
        self._held = False
        self._paused_by = ""
        self._sequence = 0
        self._over = False

    def __repr__(self) -> str:
        return f"<Hold [{'held' if self._held else 'free'}, paused by {self._paused_by or 'nobody'}]>"

    def observe(self, event: Event) -> None:
        """Every event of the log, in order."""
        self._sequence = event.seq
        if isinstance(event.data, RunPaused):
            self._paused_by = event.data.by
        elif isinstance(event.data, RunResumed):
            self._paused_by = ""
        elif event.kind == "run.finished":
            self._over = True

    async def take(self, operator: Publisher) -> bool:
        """Pause the run unless it is paused; whether that was done now."""
        if self._held or self._paused_by or self._over:
            return False
        # Noted first: whether it is stored is not known before the answer.
        self._held = True
        await operator.say("run.paused", operator.run, RunPaused(by=CHAOS), id=self._id(operator, "paused"))
        return True

    async def release(self, operator: Publisher) -> None:
        """Let the run go if we hold it."""
        if self._held and not self._over:
            if self._paused_by in ("", CHAOS):
                await operator.say("run.resumed", operator.run, RunResumed(by=CHAOS), id=self._id(operator, "resumed"))
            self._held = False

    def _id(self, operator: Publisher, verb: str) -> str:
        return f"{operator.run}.{CHAOS}.{verb}.{self._sequence}"
