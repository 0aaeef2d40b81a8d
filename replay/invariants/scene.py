"""The run as its events tell it: one state for all invariants. `replay.invariants.folding` is the code that changes it.

It is told what happened, not what should have: telling what makes no sense is the invariants' part.
"""

from __future__ import annotations

import msgspec

from schemas import events as e
from schemas.config import Config
from schemas.envelope import Event
from schemas.ids import cell_index


class CellSeen(msgspec.Struct, kw_only=True):
    index: int
    pool: bool = False
    """An engine of the separate pool."""
    capacity: int
    place: str = "serving"
    """serving, leaving, training, returning; out after a loss, until it is sent back"""
    arrived: bool = False
    """Whether the last phase before `completed` was said."""
    epoch: int = 0
    version: int = 0
    load: int = 0
    """Executions placed here and not finished, held-out ones included."""
    withdrawn: bool = False
    reserved: bool = False
    """Kept for training by a fixed split (`async`)."""
    lost: str = ""
    """Which of its services doesn't answer, until another process joins."""
    failed_epoch: int = -1
    """Epoch at which it was put out last: what is said of that epoch later comes from somebody who hadn't heard of it."""

    @property
    def serves(self) -> bool:
        return self.place == "serving"

    @property
    def takes(self) -> bool:
        """Whether executions may be placed on it."""
        return self.place == "serving" and not self.withdrawn and not self.reserved and self.lost != "rollout"


class ExecutionSeen(msgspec.Struct, kw_only=True):
    group: str
    """Empty for a held-out execution."""
    status: str = "queued"
    """queued, placed, running, finished"""
    cell: str = ""
    attempt: int = -1
    lost: bool = False
    cancelled: bool = False
    """Its group was closed without it: it holds nothing any more, and its end is still to be said."""

    @property
    def held_out(self) -> bool:
        return not self.group


class GroupSeen(msgspec.Struct, kw_only=True):
    version: int
    reason: str
    executions: list[str]
    status: str = "dispatched"
    """dispatched, ready, claimed, consumed, discarded"""
    batch: str = ""
    """That claimed it last."""


class BatchSeen(msgspec.Struct, kw_only=True):
    opened: e.BatchOpened
    closed: e.BatchStreamClosed | None = None
    join: e.BatchJoinClosed | None = None
    stepped: bool = False
    undone: bool = False
    """The core went back behind its version: nothing that is said of it counts."""
    claimed: list[str] = []
    """Groups, in the order of their claims."""
    micro_steps: dict[str, str] = {}
    """Name to the cell that holds it; empty while it is free."""
    done: dict[str, e.MicroStepDone] = {}
    """Those whose gradient is held by whoever claimed them."""
    told: list[Event] = []
    """Everything that was said of its micro-steps, in order."""
    consumed: int = 0

    def done_as_of(self, seq: int) -> dict[str, list[e.MicroStepDone]]:
        """For each micro-step what was done of it, by its holder and not released, by that sequence (0: by now)."""
        done: dict[str, list[e.MicroStepDone]] = {}
        holder: dict[str, str] = {}
        for event in self.told:
            if event.kind == "micro-step.enqueued":
                done[event.entity] = []
            elif seq and event.seq > seq:
                continue
            elif event.kind == "micro-step.claimed":
                holder[event.entity] = event.data.cell
            elif event.kind == "micro-step.released":
                # Its gradient went with the cell: what counts comes after.
                holder.pop(event.entity, None)
                done[event.entity] = []
            elif holder.get(event.entity, event.data.cell) == event.data.cell:
                done.setdefault(event.entity, []).append(event.data)
        return done


class Scene:
    """Where the run stands after the events applied so far."""

    def __init__(self) -> None:
        self.run = ""
        self.config: Config | None = None
        self.flags: frozenset[str] = frozenset()
        """Decision flags of the run."""
        self.now_us = 0
        """The scheduler's present: the latest stored time of its inputs."""
        self.finished = self.paused = False
        self.d = self.p = self.f = self.a = 0
        """The ledger: training executions dispatched, started, finished; placed and not started."""
        self.queued = self.queued_held_out = 0
        """Executions that wait for their first placement: of training, and held-out ones."""
        self.held_out = 0
        """Held-out executions that are not finished."""
        self.cells: dict[str, CellSeen] = {}
        self.added = 0
        """Cells that an operator added to those of the configuration."""
        self.processes: dict[str, int] = {}
        """Instance of a cell's service to the sequence at which its newest process joined."""
        self.executions: dict[str, ExecutionSeen] = {}
        self.groups: dict[str, GroupSeen] = {}
        self.ready: set[str] = set()
        """Groups ready and not claimed."""
        self.alive = 0
        """Groups dispatched and neither consumed nor discarded."""
        self.owed = 0
        """Discarded groups that no dispatch has replaced."""
        self.bursts = 0
        self.burst: e.BurstOpened | None = None
        self.burst_id = ""
        self.burst_done = 0
        """Steps that the open burst has made."""
        self.batches: dict[str, BatchSeen] = {}
        self.batch = ""
        """The one that is open: not every group of it is consumed."""
        self.version = 0
        """In the training cells."""
        self.published = 0
        """Version that the last burst ended with."""

    def __repr__(self) -> str:
        w = self.d - self.f
        return f"<Scene d={self.d} p={self.p} f={self.f} a={self.a} w={w} v{self.version} [{len(self.cells)} cells]>"

    @property
    def rules(self) -> Config:
        assert self.config is not None
        return self.config

    def serving(self) -> list[CellSeen]:
        """Cells that may take executions."""
        return [cell for cell in self.cells.values() if cell.takes]

    def moving(self) -> list[str]:
        return [name for name, cell in self.cells.items() if cell.place in ("leaving", "returning")]

    @property
    def cell_count(self) -> int:
        """K."""
        return self.rules.cells.count + self.added

    @property
    def strategy(self) -> str:
        return self.rules.scheduler.strategy

    @property
    def trainers(self) -> int:
        """How many cells may train."""
        return self.rules.cells.trainers(self.added)

    def undone(self, batch: str) -> bool:
        known = self.batches.get(batch)
        return known is not None and known.undone

    def given_back(self, version: int) -> list[str]:
        """Groups of the batches that a restored version undoes."""
        if version >= self.version or self.burst is None:
            return []
        undone = [each for each in self.batches.values() if not each.undone and each.opened.version >= version]
        return [group for batch in undone for group in batch.claimed]

    @property
    def held(self) -> int:
        """Slots that are taken: executions placed and not finished."""
        return sum(cell.load for cell in self.cells.values())

    def training(self) -> list[str]:
        """By index."""
        return sorted((n for n, cell in self.cells.items() if cell.place == "training"), key=cell_index)

    def served_capacity(self) -> int:
        """C_R of equation (1), of the cells that have joined."""
        return sum(cell.capacity for cell in self.serving())

    def retention(self) -> tuple[int, int]:
        """Both sides of (3): w + mu N B with what is owed, and C_s + (K - 1) C_e of the cells that are there."""
        s, cells = self.rules.scheduler, self.rules.cells
        absent = [cell for cell in self.cells.values() if cell.withdrawn or cell.lost]
        C_s = cells.C_s - sum(cell.capacity for cell in absent if cell.pool)
        K = self.cell_count - sum(not cell.pool for cell in absent)
        w = self.d - self.f + self.owed * s.group_size
        return w + s.mu * s.group_size * s.B, C_s + (K - 1) * cells.capacity

    def supply(self) -> float:
        """Ready and unclaimed groups, capped by what the batch in hand, or a whole one, still needs."""
        need = self.rules.scheduler.B
        if self.batch:
            need -= len(self.batches[self.batch].claimed)
        return min(len(self.ready), need)
