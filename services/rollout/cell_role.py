"""Where one cell stands between its two roles, folded from LOG: pure, so a restarted process knows what is its turn.

    serving --decided--> leaving --(drained, memory given back) released--> training
    training --decided--> waiting --(trainer) released--> returning --acquired--> arrived --completed--> serving
    any but serving --failed--> training

`turn` says what this process has to do now: nothing, leave, or return. Everything of an older epoch is ignored.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from schemas import events as e
from schemas.envelope import Event
from schemas.ids import cell_id

_CORE = cell_id(0)
Turn = Literal["", "leave", "return"]


class CellRole(msgspec.Struct, kw_only=True):
    cell: str
    epoch: int = 0
    stand: Literal["serving", "leaving", "training", "waiting", "returning", "arrived"] = "serving"
    cause: tuple[str, int] = ("", 0)
    """Id and sequence of the decision that the current move answers."""
    said: list[str] = []
    """Phases of that move that a rollout process of this cell has said."""
    published: int = 0
    """Newest version that was exposed for publication."""
    exposure: dict[str, Any] | None = None
    """Its address; None while the starting policy is current."""
    core: int = 0
    """Sequence at which the newest process of the core's trainer joined: the one that exposes weights."""
    process: int = 0
    """Sequence at which its newest process joined."""
    given_up: bool = False
    """That process was taken for lost: another one has to take its place."""
    exposed: tuple[str, int] = ("", 0)
    """Id and sequence of the event that said so."""
    bytes: int = 0
    over: bool = False
    """The run is finished: nobody asks for tokens any more, and nobody exposes weights."""

    @property
    def accepting(self) -> bool:
        return self.stand == "serving"

    @property
    def turn(self) -> Turn:
        if self.stand == "leaving":
            return "leave"
        return "return" if self.stand == "returning" else ""

    def fold(self, event: Event) -> None:
        data = event.data
        if isinstance(data, e.WeightsExposed) and data.purpose == "publish":
            if data.version < self.published or event.causation < self.core:
                # Older, or of a process that is gone, heard late: nobody can pull them.
                return
            self.published, self.exposure = data.version, data.address
            self.exposed, self.bytes = (event.id, event.seq), data.bytes
        elif isinstance(data, e.CellRoleTransition) and event.entity == self.cell:
            self._transition(event, data)
        elif isinstance(data, e.ServiceJoined) and event.entity == f"rollout-{self.cell}":
            self.process, self.given_up = event.seq, False
        elif isinstance(data, e.ServiceJoined) and event.entity == f"trainer-{_CORE}":
            self.core = event.seq
        elif isinstance(data, e.CellLost) and event.entity == self.cell and data.service == "rollout":
            self.given_up = data.process == self.process
        elif isinstance(data, e.RunFinished):
            self.over = True

    def _transition(self, event: Event, data: e.CellRoleTransition) -> None:
        if data.phase == "decided":
            self.epoch, self.cause, self.said = data.epoch, (event.id, event.seq), []
            self.stand = "leaving" if data.target == "train" else "waiting"
            return
        if data.epoch != self.epoch:
            return
        if event.owner == "rollout":
            self.said.append(data.phase)
        if data.phase == "released" and event.owner == "rollout":
            self.stand = "training"
        elif data.phase == "released" and event.owner == "trainer":
            self.stand = "returning"
        elif data.phase == "acquired" and event.owner == "rollout":
            self.stand = "arrived"
        elif data.phase == "failed":
            self.stand = "training"
        elif data.phase == "completed" and data.target == "rollout":
            self.stand = "serving"
