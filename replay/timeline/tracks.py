"""From events to the document of a timeline. Pure; what the run stands at is `replay.invariants`' scene, folded once.

Invariants: a series has a row when its value changes, and at steps and publications always; rows are in log order.
"""

from __future__ import annotations

import msgspec

from replay.invariants.folding import apply
from replay.invariants.scene import CellSeen, Scene
from replay.timeline.model import ROLES, CellRow, Document, Rules, Says, SeriesRow
from replay.timeline.notes import note, reasons
from replay.timeline.thinning import forget_names, thin
from schemas.config import Config
from schemas.envelope import Event
from schemas.kinds import is_decision

LISTED = 400_000
"""Events that a page lists."""
_PLACES = {"serving": 0, "leaving": 1, "training": 2, "returning": 3, "out": 4}
_AWAY = ROLES.index("away")


class Tracks:
    """Takes the events of a run in order. `take` gives the rows since the last `take`: of a whole log, the document.

    Without a title the run's name and strategy are one. `limit` bounds the events that are listed, and memory with them;
    None lists every event.

    >>> tracks = Tracks("a run")
    >>> for event in events:
    ...     tracks.see(event)
    >>> document = tracks.take()
    """

    def __init__(self, title: str = "", *, limit: int | None = LISTED) -> None:
        self._limit = limit
        self._scene = Scene()
        self._start_us = self._time_us = 0
        self._head = Document(title=title)
        self._part = Document()
        self._names: dict[str, int] = {}
        self._checks: dict[str, int] = {}
        self._says: dict[tuple[str, str], int] = {}
        self._cells: dict[str, int] = {}
        self._series: dict[tuple[str, int], int] = {}
        self._values: dict[tuple[str, int], int] = {}
        self._working: dict[str, list[str]] = {}
        """Cell to the micro-steps that it claimed and has not done."""

    def __repr__(self) -> str:
        return f"<Tracks {self._head.run} [{len(self._cells)} cells, {len(self._names)} entities, {self._scene!r}]>"

    def see(self, event: Event) -> None:
        """The next event of LOG."""
        self._start_us = self._start_us or event.time_us
        self._time_us = max(self._time_us, event.time_us)
        self._head.first = self._head.first or event.seq
        self._head.last = event.seq
        known = not isinstance(event.data, msgspec.Raw)
        before = self._scene.executions.get(event.entity)
        source = before.cell if before is not None else ""
        holder = self._holder(event) if known and event.kind == "micro-step.released" else ""
        made = known and event.kind == "batch.stepped" and self._first_step(event)
        apply(self._scene, event)
        self._list(event, known)
        if made:
            self._set(event, "step", event.data.step, always=True)
        if known:
            self._follow(event, source, holder)
        if self._limit is not None and len(self._part.events.seq) > 2 * self._limit:
            thin(self._part, self._limit)

    def take(self) -> Document:
        """Rows and entries of lists since the last time, and the head as it stands. Appending parts gives the whole."""
        head, part = self._head, self._part
        head.start_us, head.end = self._start_us, self._t()
        for field in ("title", "run", "code", "start_us", "end", "first", "last", "finished", "rules"):
            setattr(part, field, getattr(head, field))
        if self._limit is not None:
            thin(part, self._limit)
            forget_names(part)
        self._part = Document()
        return part

    def _t(self) -> int:
        return (self._time_us - self._start_us) // 1000

    def _list(self, event: Event, known: bool) -> None:
        rows = self._part.events
        key = (event.kind, event.owner)
        if key not in self._says:
            self._says[key] = len(self._says)
            self._part.says.append(Says(kind=event.kind, owner=event.owner, decision=is_decision(*key)))
        rows.seq.append(event.seq)
        rows.t.append(self._t())
        rows.says.append(self._says[key])
        rows.entity.append(self._name(event.entity))
        rows.cell.append(self._concerned(event) if known else -1)
        rows.cause.append(event.causation)
        rows.note.append(note(event))
        for each in reasons(event):
            if each.rule not in self._checks:
                self._checks[each.rule] = len(self._checks)
                self._part.checks.append(each.rule)
            table = self._part.reasons
            table.seq.append(event.seq)
            table.rule.append(self._checks[each.rule])
            table.left.append(each.left)
            table.op.append(each.op)
            table.right.append(each.right)
            table.holds.append(int(each.holds))

    def _name(self, entity: str) -> int:
        if entity not in self._names:
            self._names[entity] = len(self._names)
            self._part.names.append(entity)
        return self._names[entity]

    def _concerned(self, event: Event) -> int:
        if event.kind == "cell.joined":
            self._joined(event)
        cell = getattr(event.data, "cell", "") or getattr(event.data, "target", "")
        return self._cells.get(event.entity, self._cells.get(cell, -1))

    def _joined(self, event: Event) -> None:
        cell = self._scene.cells[event.entity]
        if event.entity not in self._cells:
            self._cells[event.entity] = len(self._cells)
            self._part.cells.append(
                CellRow(name=event.entity, index=cell.index, pool=cell.pool, capacity=cell.capacity)
            )

    def _follow(self, event: Event, source: str, holder: str) -> None:
        entity = event.kind.partition(".")[0]
        if entity in ("execution", "route"):
            self._ledger(event, source)
        elif entity == "group":
            self._supply(event)
        elif entity == "micro-step":
            self._work(event, holder)
        elif entity in ("cell", "service", "weights"):
            self._roles(event)
        elif entity in ("run", "batch", "burst", "checkpoint"):
            self._run(event)

    def _ledger(self, event: Event, source: str) -> None:
        scene = self._scene
        for name, value in (("d", scene.d), ("p", scene.p), ("f", scene.f), ("held_out", scene.held_out)):
            self._set(event, name, value)
        execution = scene.executions.get(event.entity)
        for cell in {source, execution.cell if execution is not None else ""} & scene.cells.keys():
            self._set(event, "load", scene.cells[cell].load, self._cells[cell])

    def _supply(self, event: Event) -> None:
        self._set(event, "ready", len(self._scene.ready))
        if self._scene.config is not None:
            self._set(event, "supply", int(self._scene.supply()))
        self._batch(event)

    def _batch(self, event: Event) -> None:
        scene = self._scene
        self._set(event, "batch", self._name(scene.batch) if scene.batch else -1)
        batch = scene.batches.get(scene.batch)
        if batch is not None:
            self._set(event, "claimed", len(batch.claimed))
            self._set(event, "enqueued", len(batch.micro_steps))
            self._set(event, "done", len(batch.done))

    def _first_step(self, event: Event) -> bool:
        """Whether the step is made now: it may be said again, and of a batch that was undone."""
        batch = self._scene.batches.get(event.entity)
        return batch is not None and not batch.stepped and not batch.undone

    def _holder(self, event: Event) -> str:
        batch = self._scene.batches.get(event.data.batch)
        return batch.micro_steps.get(event.entity, "") if batch is not None else ""

    def _work(self, event: Event, holder: str) -> None:
        self._batch(event)
        cell = holder if event.kind == "micro-step.released" else getattr(event.data, "cell", "")
        mine = self._working.setdefault(cell, [])
        if event.kind == "micro-step.claimed":
            mine.append(event.entity)
        elif event.entity in mine:
            mine.remove(event.entity)
        self._busy(event, cell)

    def _busy(self, event: Event, cell: str) -> None:
        if cell in self._cells:
            mine = self._working.get(cell)
            self._set(event, "micro_step", self._name(mine[0]) if mine else -1, self._cells[cell])

    def _roles(self, event: Event) -> None:
        scene, data = self._scene, event.data
        for name, index in self._cells.items():
            cell = scene.cells[name]
            self._set(event, "role", _role(cell), index)
            self._set(event, "epoch", cell.epoch, index)
            self._set(event, "version", cell.version, index)
            if not scene.cells[name].place == "training":
                self._working.pop(name, None)
                self._busy(event, name)
        if scene.config is not None:
            self._set(event, "C_R", scene.served_capacity())
        if event.kind == "cell.held":
            self._set(event, "held", event.seq)
        elif event.kind == "cell.role-transition" and data.phase in ("decided", "failed") and event.entity in self._cells:
            self._set(event, "because", event.seq, self._cells[event.entity])
            self._set(event, "held", 0)

    def _run(self, event: Event) -> None:
        scene, data = self._scene, event.data
        if event.kind == "run.started":
            self._head.run, self._head.code, self._head.rules = event.entity, data.code, _rules(data.config)
            self._head.title = self._head.title or f"{event.entity}, strategy {self._head.rules.strategy}"
        elif event.kind == "run.finished":
            self._head.finished = data.reason
            self._set(event, "held", 0)
        elif event.kind == "burst.ended":
            self._set(event, "published", data.version, always=True)
            self._set(event, "held", 0)
        elif event.kind == "checkpoint.restored":
            self._working.clear()
            for cell in self._cells:
                self._busy(event, cell)
        self._set(event, "burst", scene.bursts)
        self._set(event, "version", scene.version)
        self._set(event, "paused", int(scene.paused))
        self._supply(event)

    def _set(self, event: Event, name: str, value: int, cell: int = -1, *, always: bool = False) -> None:
        key = (name, cell)
        if not always and self._values.get(key) == value:
            return
        if key not in self._series:
            self._series[key] = len(self._series)
            self._part.series.append(SeriesRow(name=name, cell=cell))
        self._values[key] = value
        rows = self._part.changes
        rows.seq.append(event.seq)
        rows.t.append(self._t())
        rows.series.append(self._series[key])
        rows.value.append(value)


def _role(cell: CellSeen) -> int:
    return _AWAY if cell.place == "serving" and not cell.takes else _PLACES[cell.place]


def _rules(config: Config) -> Rules:
    s, cells = config.scheduler, config.cells
    return Rules(
        strategy=s.strategy,
        N=s.N,
        B=s.B,
        mu=s.mu,
        phi=s.phi,
        rho_min=s.rho_min,
        tau_s=s.tau_s,
        C_e=cells.capacity,
        C_s=cells.C_s,
        steps=config.steps,
    )
