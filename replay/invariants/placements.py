"""Invariants of placements and routes: capacity, the start rule, who may serve. In the scheduler's order."""

from __future__ import annotations

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import in_pool


class Capacity(Invariant):
    """No cell holds more executions, placed and unfinished, than C_e, and all together never more than C_R; a cell in
    transition or training serves nobody.

    Source: equation (1); DESIGN section 4
    """

    name = "capacity"
    order = "scheduler"

    @on("execution.placed", "route.moved")
    def taken(self, event: Event) -> None:
        scene, data = self.scene, event.data
        moved = event.kind == "route.moved"
        name: str = data.target if moved else data.cell
        execution, cell = scene.executions.get(event.entity), scene.cells.get(name)
        if execution is None or execution.status == "finished":
            self.violated(event, "takes room and is not there")
            return
        if cell is None or not cell.serves:
            self.violated(event, f"{name} is not in the rollout role")
            if cell is None:
                return
        held = execution.cell if execution.status in ("placed", "running") else ""
        load = cell.load + (held != name)
        if load > cell.capacity:
            self.violated(event, f"{name} holds {load} of {cell.capacity}")

    @on("cell.role-transition")
    def completed(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        cell = self.scene.cells.get(event.entity)
        if cell is not None and cell.load and data.phase == "completed" and data.target == "train":
            self.violated(event, f"trains with {cell.load} executions on it")


class RoutesToServing(Invariant):
    """Executions are placed on, and moved to, cells that serve at the epoch that is said and hold the version published
    last, never one that an operator withdrew or whose engine is lost; a move starts where the execution is, and goes to
    the separate pool while that has room, then to the cell with the highest index that has.

    Source: DESIGN section 5
    """

    name = "routes_to_serving"
    order = "scheduler"

    @on("execution.placed")
    def placed(self, event: Event) -> None:
        data: e.ExecutionPlaced = event.data
        # A lost attempt's slot is where its execution was served already.
        self._to(event, data.cell, data.epoch, current=data.attempt == 0)

    @on("route.moved")
    def moved(self, event: Event) -> None:
        data: e.RouteMoved = event.data
        self._to(event, data.target, data.epoch, current=False)
        free = {name: cell for name, cell in self.scene.cells.items() if cell.takes and cell.load < cell.capacity}
        best = max(free, key=lambda name: (free[name].pool, free[name].index), default="")
        preferred = in_pool(data.target) if in_pool(best) else data.target == best
        if data.target in free and not preferred:
            self.violated(event, f"moved to {data.target}, {best} has room")
        execution = self.scene.executions.get(event.entity)
        if execution is not None and execution.cell != data.source:
            self.violated(event, f"moved from {data.source}, it is on {execution.cell or 'no cell'}")

    def _to(self, event: Event, name: str, epoch: int, *, current: bool) -> None:
        cell = self.scene.cells.get(name)
        if cell is None or not cell.serves:
            self.violated(event, f"{name} serves nobody ({cell.place if cell else 'it never joined'})")
            return
        if not cell.takes:
            self.violated(event, f"{name} is {'withdrawn' if cell.withdrawn else 'lost'}")
        if cell.epoch != epoch:
            self.violated(event, f"{name} is at epoch {cell.epoch}, said is {epoch}")
        if current and cell.version < self.scene.published:
            self.violated(event, f"{name} holds version {cell.version}, published is {self.scene.published}")


class StartRule(Invariant):
    """min(d - p - a, C_R - (p - f) - a) executions start whenever capacity is free and an engine is ready, no more, and
    at once; the next attempt of a lost one goes out as soon as the cell that has its slot serves. Held-out executions take
    slots too, before the others; after the last burst only they start.

    Source: section 'Boundary dispatch and waterlevel control'; DESIGN section 4
    """

    name = "start_rule"
    order = "scheduler"

    def begin(self) -> None:
        self._lost: dict[str, None] = {}
        self._look = False
        """Something happened after which somebody may start."""

    @on(
        "run.resumed",
        "execution.dispatched",
        "cell.joined",
        "cell.reinstated",
        "cell.lost",
        "service.joined",
        "cell.role-transition",
        "weights.published",
        "burst.ended",
    )
    def changed(self, event: Event) -> None:
        self._look = True

    @on("execution.placed")
    def placed(self, event: Event) -> None:
        data: e.ExecutionPlaced = event.data
        self._look = True
        self._lost.pop(event.entity, None)
        if data.attempt == 0 and self._startable() <= 0:
            free = self.scene.served_capacity() - self.scene.held
            self.violated(event, f"started with {self._queued()} queued and {free} of C_R free")
        execution = self.scene.executions.get(event.entity)
        if execution is not None and data.attempt == 0 and self.scene.queued_held_out and not execution.held_out:
            self.violated(event, f"started before {self.scene.queued_held_out} held-out executions")

    @on("execution.lost")
    def lost(self, event: Event) -> None:
        self._look = True
        self._lost[event.entity] = None

    @on("execution.finished", "execution.cancelled", "route.moved")
    def left(self, event: Event) -> None:
        self._look = True
        if event.kind != "route.moved":
            self._lost.pop(event.entity, None)

    def decided(self, event: Event) -> None:
        scene = self.scene
        if not self._look or scene.paused or scene.finished or scene.config is None:
            return
        self._look = False
        if self._lost:
            self._again(event)
        if self._queued() and self._startable() > 0 and self._ready():
            self.violated(event, f"{self._queued()} wait, {self._startable()} could start on {names(self._ready())}")

    def _again(self, event: Event) -> None:
        executions, cells = self.scene.executions, self.scene.cells
        for name in self._lost:
            execution = executions.get(name)
            if execution is None or not execution.lost:
                continue
            cell = cells.get(execution.cell)
            if cell is not None and cell.takes:
                self.violated(event, f"{name} was lost and not placed again on {execution.cell}")

    def _queued(self) -> int:
        return self.scene.queued_held_out + (self.scene.queued if self.scene.burst is not None else 0)

    def _startable(self) -> int:
        return min(self._queued(), self.scene.served_capacity() - self.scene.held)

    def _ready(self) -> list[str]:
        cells = self.scene.cells.items()
        return [
            name
            for name, cell in cells
            if cell.takes and cell.load < cell.capacity and cell.version >= self.scene.published
        ]


class Paused(Invariant):
    """While the run is paused nothing is placed, no cell joins training and no burst ends; after its end nothing is decided.

    Source: DESIGN section 11 (operator commands are events)
    """

    name = "paused"
    order = "scheduler"

    @on("execution.placed")
    def placed(self, event: Event) -> None:
        if self.scene.paused:
            self.violated(event, "placed while the run is paused")
        if self.scene.finished:
            self.violated(event, "placed after the run was over")

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        if data.phase == "decided" and data.target == "train" and (self.scene.paused or self.scene.finished):
            self.violated(event, "joins training while the run is paused or over")

    @on("burst.ended")
    def ended(self, event: Event) -> None:
        if self.scene.paused:
            self.violated(event, "ended while the run is paused")

    @on("group.dispatched")
    def dispatched(self, event: Event) -> None:
        if self.scene.finished:
            self.violated(event, "dispatched after the run was over")
