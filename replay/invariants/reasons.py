"""The invariant of reasons: what decisions say of why they were taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event
from schemas.flags import REASONS
from schemas.units import Check

_RULES = {
    "run.finished": ("steps of the run",),
    "burst.opened": ("steps of the run",),
    "burst.ended": ("steps of the burst", "engines behind the version"),
    "batch.opened": ("steps of the burst", "cells that train"),
    "batch.join-closed": ("micro-steps done", "cells on their way to training"),
    "group.consumed": ("step made",),
    "route.moved": ("target has room",),
    "measurement.closed": ("executions without outcome",),
    "timer.set": ("supply rho_min B",),
    "initial": ("initial dispatch (phi + mu) B",),
    "boundary": ("boundary dispatch mu B",),
    "replacement": ("discarded groups",),
    "refill": ("discarded groups", "groups of the burst"),
    "train": ("next of the prefix", "epoch of its arrival"),
    "rollout": ("epoch of its arrival",),
}
"""Kind, reason of a dispatch, or role that was reached, to the checks that the decision carries with the flag."""


class Reasons(Invariant):
    """Every decision of the scheduler carries the inequalities that allowed it, both sides as they stood: they are true as they
    are said, they hold, and their numbers are the ledger's; a route says what took its source away. What keeps the next
    cell from training is said once, when another check fails first. In runs without the flag `reasons` only placements, changes
    of role and the ends of bursts do.

    Source: DESIGN section 4 (every decision carries its reason as data)
    """

    name = "reasons"
    order = "scheduler"

    def begin(self) -> None:
        self._held = ("", "")
        self._dispatched: Counter[str] = Counter()
        """Groups of the open burst by the reason of their dispatch."""
        self._recalled: set[str] = set()
        """Cells that train and are to go back since the last burst ended."""
        self._arrived: dict[str, int] = {}
        """Cell to the epoch of the last `acquired` that was its own."""
        self._measured = -1
        self._unsettled: dict[str, set[str]] = {}
        """Measurement to its executions without outcome."""

    @on("cell.held")
    def held(self, event: Event) -> None:
        failing = next((each.rule for each in event.data.reason if not each.holds), "")
        if not failing:
            self.violated(event, "held, and every check holds")
        if (event.entity, failing) == self._held:
            self.violated(event, f"held by {failing}, as was said before")
        self._held = (event.entity, failing)
        self._look(event, event.data.reason, holding=False)

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        cell = self.scene.cells.get(event.entity)
        if data.phase == "acquired" and cell is not None and data.epoch == cell.epoch:
            self._arrived[event.entity] = data.epoch
        elif data.phase == "completed":
            self._said(event, data.reason, _RULES[data.target])
        elif data.phase in ("decided", "failed"):
            self._recalled.discard(event.entity)
            back = data.target == "rollout" or data.phase == "failed"
            if data.phase == "decided":
                self._held = ("", "")
            # A cell that returns carries what stood when its burst ended.
            self._look(event, data.reason, holding=not back, sides=not back)

    @on("execution.placed")
    def placed(self, event: Event) -> None:
        self._look(event, event.data.reason)

    @on("execution.settled")
    def settled(self, event: Event) -> None:
        for open_ in self._unsettled.values():
            open_.discard(event.entity)

    @on("burst.ended")
    def ended(self, event: Event) -> None:
        data: e.BurstEnded = event.data
        training = self.scene.training()
        self._recalled = set(training) - set(data.stays)
        self._look(event, data.reason, holding=False)
        self._said(event, data.checks, _RULES[event.kind])
        strategy = self.scene.strategy
        if REASONS in self.scene.flags and strategy != "colocate":
            stays = data.core_stays if strategy == "elastic" else data.stays == training
            if stays != all(each.holds for each in data.reason):
                self.violated(event, f"{names(data.stays) or 'nobody'} stays, and the checks say otherwise")

    @on("group.dispatched")
    def dispatched(self, event: Event) -> None:
        data: e.GroupDispatched = event.data
        self._said(event, data.checks, _RULES[data.reason])
        self._dispatched[data.reason] += 1

    @on("burst.opened", "batch.opened", "batch.join-closed", "group.consumed", "timer.set")
    def carried(self, event: Event) -> None:
        if event.kind == "burst.opened":
            self._dispatched.clear()
        if event.owner == "scheduler":
            self._said(event, event.data.reason, _RULES[event.kind])

    @on("run.finished")
    def finished(self, event: Event) -> None:
        if event.owner == "scheduler":
            self._said(event, event.data.checks, _RULES[event.kind])

    @on("route.moved")
    def rerouted(self, event: Event) -> None:
        data: e.RouteMoved = event.data
        self._said(event, data.checks, _RULES[event.kind])
        source, why = self.scene.cells.get(data.source), ""
        if REASONS in self.scene.flags and source is not None:
            away = "lost" if source.lost == "rollout" else "withdrawn"
            why = "transition" if source.place == "leaving" else away
        if data.reason != why:
            self.violated(event, f"{data.source} is left for {data.reason or 'no reason'}, expected {why or 'none'}")

    @on("measurement.opened")
    def opened(self, event: Event) -> None:
        data: e.MeasurementOpened = event.data
        first = self._measured < 0 or self.scene.burst is None
        due = "version measured last" if first else "steps since the last measurement"
        self._said(event, data.reason, (due, "steps made since the boundary"))
        self._measured = data.version
        self._unsettled[event.entity] = set(data.executions)

    @on("measurement.closed")
    def closed(self, event: Event) -> None:
        self._said(event, event.data.reason, _RULES[event.kind])
        self._unsettled.pop(event.entity, None)

    def _said(self, event: Event, given: Sequence[Check], rules: Sequence[str]) -> None:
        """What came with the flag: these rules, and none without it."""
        expected = list(rules) if REASONS in self.scene.flags else []
        said = [each.rule for each in given]
        if said != expected:
            self.violated(event, f"carries {', '.join(said) or 'no checks'}, expected {', '.join(expected) or 'none'}")
        self._look(event, given)

    def _look(self, event: Event, given: Sequence[Check], *, holding: bool = True, sides: bool = True) -> None:
        for each in given:
            op = {"<=": each.left <= each.right, ">=": each.left >= each.right, "<": each.left < each.right}
            op |= {">": each.left > each.right, "==": each.left == each.right}
            # Whatever the clock says, the supply lasts when its timer has fired.
            if op[each.op] != each.holds and each.rule != "supply for tau":
                self.violated(event, f"{each.rule}: {each.left:g} {each.op} {each.right:g} is said to be {each.holds}")
            if holding and not each.holds:
                self.violated(event, f"{each.rule} does not hold")
            told = self._sides(event, each.rule) if sides else None
            if told is not None and (each.left, each.right) != told:
                self.violated(
                    event, f"{each.rule}: {each.left:g} and {each.right:g}, the log says {told[0]:g} and {told[1]:g}"
                )

    def _sides(self, event: Event, rule: str) -> tuple[float, float] | None:
        scene, config = self.scene, self.scene.rules
        s, C_e, data = config.scheduler, config.cells.capacity, event.data
        match rule:
            case "capacity (1)":
                return (scene.held, scene.served_capacity())
            # Those that leave together share the check of the first.
            case "waterlevel (2)" | "held-out executions fit" if s.strategy == "colocate":
                return None
            case "waterlevel (2)":
                return (scene.d - scene.f, scene.served_capacity() - C_e)
            case "held-out executions fit":
                return (scene.d - scene.f + scene.held_out, scene.served_capacity() - C_e)
            case "supply rho_min B":
                return (scene.supply(), s.rho_min * s.B)
            case "engine has room" | "its slot is held":
                return self._load(data.cell)
            case "target has room":
                return self._load(data.target)
            case "initial dispatch (phi + mu) B":
                return (self._dispatched["initial"], round(s.phi * s.B) + s.mu * s.B)
            case "boundary dispatch mu B":
                return (self._dispatched["boundary"], s.mu * s.B)
            case "fixed split" if event.kind == "burst.ended":
                return (len(data.stays), scene.trainers)
            case "fixed split":
                return (self._index(event.entity), scene.trainers)
            case "groups without outcome":
                return (sum(group.status == "dispatched" for group in scene.groups.values()), 0)
            case "discarded groups":
                return (scene.owed, 0)
            case "executions without outcome":
                return (len(self._unsettled.get(event.entity, ())), 0)
            case "version measured last":
                return (self._measured, scene.published)
            case "steps since the last measurement":
                return (scene.published - self._measured, config.eval.every)
            case "steps made since the boundary":
                return (scene.burst_done if scene.burst is not None else 0, 0)
        return self._training_sides(event, rule)

    def _training_sides(self, event: Event, rule: str) -> tuple[float, float] | None:
        """Of rules about bursts, batches and who trains them."""
        scene, data, burst = self.scene, event.data, self.scene.burst
        last = burst.first_step + burst.steps - 1 if burst is not None else 0
        match rule:
            case "steps of the run" if event.kind == "run.finished":
                return (scene.published, scene.rules.steps)
            case "steps of the run":
                return (scene.bursts * scene.rules.scheduler.mu, scene.rules.steps)
            case "steps of the burst" if burst is not None:
                return (scene.burst_done, burst.steps)
            case "groups of the burst" if burst is not None:
                return (scene.alive, (burst.steps - scene.burst_done) * scene.rules.scheduler.B)
            case "groups of the burst mu B" if burst is not None:
                return (self._at_hand(), (burst.steps - scene.burst_done) * scene.rules.scheduler.B)
            case "core retention (3)":
                return scene.retention()
            case "steps that follow":
                return (scene.rules.steps - last, 0)
            case "engines behind the version":
                return (sum(cell.version < data.version for cell in scene.serving()), 0)
            case "none of them withdrawn":
                return (sum(scene.cells[name].withdrawn for name in scene.training()), 0)
            case "cells that train":
                return (len(set(scene.training()) - self._recalled), 1)
            case "cells on their way to training":
                return (sum(cell.place == "leaving" for cell in scene.cells.values()), 0)
            case "next of the prefix":
                return (self._index(event.entity), len(scene.training()))
            case "epoch of its arrival":
                cell = scene.cells.get(event.entity)
                return (self._arrived.get(event.entity, -1), cell.epoch if cell is not None else -1)
            case "micro-steps done" | "step made":
                return self._batch_sides(event)
        return None

    def _batch_sides(self, event: Event) -> tuple[float, float] | None:
        data: Any = event.data
        batch = self.scene.batches.get(event.entity if event.kind == "batch.join-closed" else data.batch)
        if batch is None:
            return None
        if event.kind == "group.consumed":
            return (self.scene.version, batch.opened.version)
        return (len(batch.done), batch.closed.micro_steps if batch.closed is not None else -1)

    def _at_hand(self) -> int:
        """Groups that are ready, and those that the open batch has already."""
        batch = self.scene.batches.get(self.scene.batch)
        return len(self.scene.ready) + (len(batch.claimed) if batch is not None and not batch.stepped else 0)

    def _load(self, name: str) -> tuple[float, float]:
        cell = self.scene.cells.get(name)
        return (cell.load, cell.capacity) if cell else (-1, -1)

    def _index(self, name: str) -> int:
        cell = self.scene.cells.get(name)
        return cell.index if cell is not None else -1
