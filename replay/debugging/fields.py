"""Named fields of the scheduler's state: what a view shows is what a breakpoint can ask for.

Reading a field costs nothing that grows with the run, so a condition can be looked at after every event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from replay.debugging.moments import Moment
from replay.timeline.model import ROLES
from schemas.ids import cell_id, pool_id
from services.scheduler.core.state import Batch, Cell, State, cell_count, next_to_train, served_capacity, supply

Type = Literal["number", "word", "yes or no"]
Value = float | int | str | bool | None


class Field(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    meaning: str
    type: Type
    read: Callable[[Moment], Value]
    """None where there is nothing of the kind at the moment."""


class CellField(msgspec.Struct, frozen=True, kw_only=True):
    """Of `cells[0]`, `cells[1]`, ... and of the separate pool's engines, `pool[0]`, ..."""

    name: str
    meaning: str
    type: Type
    read: Callable[[Cell], Value]


_PLACES = {"serving": "rollout"}


def role(cell: Cell) -> str:
    """As pictures have it: see `replay.timeline.model.ROLES`."""
    if cell.place == "serving" and cell.absent:
        return "away"
    return _PLACES.get(cell.place, cell.place)


def cell_of(state: State, group: Literal["cells", "pool"], index: int) -> Cell | None:
    return state.cells.get(cell_id(index) if group == "cells" else pool_id(index))


def _of(read: Callable[[State], Value]) -> Callable[[Moment], Value]:
    return lambda moment: read(moment.state)


def _ruled(read: Callable[[State], Value]) -> Callable[[Moment], Value]:
    """None before `run.started`."""
    return lambda moment: read(moment.state) if moment.state.config is not None else None


def _batch(read: Callable[[Batch], Value]) -> Callable[[Moment], Value]:
    return lambda moment: read(moment.state.batch) if moment.state.batch is not None else None


def _burst(name: str) -> Callable[[Moment], Value]:
    return lambda moment: getattr(moment.state.burst, name, None)


def _due_s(moment: Moment) -> float | None:
    return (moment.state.supply_due_us - moment.now_us) / 1e6 if moment.state.supply_timer else None


def _claimed(state: State) -> int:
    return len(state.batch.groups) if state.batch is not None else 0


def _table(*rows: tuple[str, Type, Callable[[Moment], Value], str]) -> dict[str, Field]:
    return {name: Field(name=name, type=type, read=read, meaning=meaning) for name, type, read, meaning in rows}


FIELDS: dict[str, Field] = _table(
    ("seq", "number", lambda m: m.event.seq, "sequence of the event"),
    ("time_s", "number", lambda m: m.time_s, "seconds since the log's first event"),
    ("kind", "word", lambda m: m.event.kind, "of the event"),
    ("entity", "word", lambda m: m.event.entity, "that it is about"),
    ("owner", "word", lambda m: m.event.owner, "who says it"),
    ("paused", "yes or no", _of(lambda s: s.paused), "by an operator"),
    ("finished", "yes or no", _of(lambda s: s.finished), ""),
    ("d", "number", _of(lambda s: s.d), "executions dispatched so far"),
    ("p", "number", _of(lambda s: s.p), "started so far"),
    ("f", "number", _of(lambda s: s.f), "finished so far"),
    ("a", "number", _of(lambda s: s.a), "placed and not yet started"),
    ("w", "number", _of(lambda s: s.d - s.f), "waterlevel d - f"),
    ("queued", "number", _of(lambda s: len(s.line) - s.line_from), "executions without a slot"),
    ("C_R", "number", _ruled(served_capacity), "executions that the serving engines take, equation (1)"),
    ("C_e", "number", _ruled(lambda s: s.rules.cells.capacity), "that one cell takes"),
    ("C_s", "number", _of(lambda s: s.index.C_s), "that the separate pool takes"),
    ("K", "number", _ruled(cell_count), "cells of the run"),
    ("version", "number", _of(lambda s: s.version), "v_t, in the training cells"),
    ("published", "number", _of(lambda s: s.published), "version that every serving engine had last"),
    ("publishing", "number", _of(lambda s: s.publishing if s.publishing >= 0 else None), "on its way to the engines"),
    ("burst.index", "number", _burst("index"), "from 1"),
    ("burst.steps", "number", _burst("steps"), "mu, or what the run has left"),
    ("burst.done", "number", _burst("done"), "steps made"),
    ("batch.id", "word", _batch(lambda b: b.id), ""),
    ("batch.step", "number", _batch(lambda b: b.step), "training step that it feeds, from 1"),
    ("batch.claimed", "number", _batch(lambda b: b.claimed), "groups claimed for it"),
    (
        "batch.micro_steps",
        "number",
        _batch(lambda b: b.micro_steps if b.micro_steps >= 0 else None),
        "once its stream is closed",
    ),
    ("batch.done", "number", _batch(lambda b: b.done), "micro-steps whose gradient is held"),
    ("batch.join_closed", "yes or no", _batch(lambda b: b.join_closed), ""),
    ("batch.stepped", "yes or no", _batch(lambda b: b.stepped), ""),
    ("groups.dispatched", "number", _of(lambda s: len(s.groups) - s.index.ready - _claimed(s)), "without rewards yet"),
    ("groups.ready", "number", _of(lambda s: s.index.ready), "ready and unclaimed"),
    ("groups.claimed", "number", _of(_claimed), "by the open batch, not consumed"),
    ("groups.owed", "number", _of(lambda s: s.owed), "discarded, not replaced yet"),
    ("supply.ready", "number", _ruled(supply), "ready groups, capped by what the batch still needs"),
    ("supply.needed", "number", _ruled(lambda s: s.rules.scheduler.rho_min * s.rules.scheduler.B), "rho_min B"),
    ("supply.timer", "word", _of(lambda s: s.supply_timer or None), "armed: the supply has held since less than tau"),
    ("supply.due_s", "number", _due_s, "seconds until that timer is due"),
    ("supply.held", "yes or no", _of(lambda s: s.supply_held), "whether the supply has held for tau"),
    ("held.cell", "word", _of(lambda s: s.held[0] or None), "said last to be held back from training"),
    ("held.rule", "word", _of(lambda s: s.held[1] or None), "the first check that failed then"),
    ("next_cell", "word", _ruled(next_to_train), "of the growing prefix"),
    ("count.serving", "number", _of(lambda s: s.index.able), "cells that may take executions, without the pool"),
    ("count.training", "number", _of(lambda s: s.index.prefix), "cells in the training role"),
    ("count.moving", "number", _of(lambda s: len(s.index.moving)), "cells on their way"),
    (
        "measurement.id",
        "word",
        _of(lambda s: getattr(s.measurement, "id", None)),
        "the held-out measurement that is open",
    ),
    ("measurement.open", "number", lambda m: _open(m.state), "its executions that are not settled"),
)


def _cell_table(*rows: tuple[str, Type, Callable[[Cell], Value], str]) -> dict[str, CellField]:
    return {name: CellField(name=name, type=type, read=read, meaning=meaning) for name, type, read, meaning in rows}


CELL_FIELDS: dict[str, CellField] = _cell_table(
    ("role", "word", role, f"one of {', '.join(ROLES)}"),
    ("load", "number", lambda cell: cell.load, "executions placed on it and not finished"),
    ("capacity", "number", lambda cell: cell.capacity, "C_e, or the engine's own"),
    ("epoch", "number", lambda cell: cell.epoch, "rises with every change of its role"),
    ("version", "number", lambda cell: cell.version, "of the policy in its engine"),
    ("withdrawn", "yes or no", lambda cell: cell.withdrawn, "an operator wants it empty"),
    ("lost", "word", lambda cell: cell.lost or None, "which of its processes is gone"),
)


def _open(state: State) -> int | None:
    return len(state.measurement.open) if state.measurement is not None else None


def values(moment: Moment) -> dict[str, Any]:
    """Every field at the moment, nested as their names are: `batch` holds `step`, or is None where there is no batch."""
    found: dict[str, Any] = {}
    for name, field in FIELDS.items():
        outer, _, inner = name.rpartition(".")
        (found.setdefault(outer, {}) if outer else found)[inner] = field.read(moment)
    for name, inner in found.items():
        if isinstance(inner, dict) and all(value is None for value in inner.values()):
            found[name] = None
    for group, pool in (("cells", False), ("pool", True)):
        found[group] = [
            {"name": name, **{each.name: each.read(cell) for each in CELL_FIELDS.values()}}
            for name, cell in sorted(moment.state.cells.items(), key=lambda item: item[1].index)
            if cell.pool is pool
        ]
    return found


def line(moment: Moment) -> str:
    """Where the run stands, in one line."""
    s = moment.state
    ruled = s.config is not None
    C_R = served_capacity(s) if ruled else 0
    ready = f"{supply(s)}/{s.rules.scheduler.rho_min * s.rules.scheduler.B:g}" if ruled else "0"
    cells = "".join(_LETTERS[role(cell)] for _, cell in sorted(s.cells.items(), key=lambda i: (i[1].pool, i[1].index)))
    return f"w {s.d - s.f} = {s.d} - {s.f}, C_R {C_R}, supply {ready}, version {s.version}, cells {cells or 'none'}"


_LETTERS = {"rollout": "R", "leaving": ">", "training": "T", "returning": "<", "out": "x", "away": "-"}
