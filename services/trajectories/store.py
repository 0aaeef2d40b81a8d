"""The database of one run: events become rows, in one transaction with the position in LOG that they bring it to.

Synchronous; callers on an event loop run it in a thread. Applying an event again changes nothing: rows are keyed by
ids, and an event at or before the position is skipped. SQLite is the default, any SQLAlchemy database will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from sqlalchemy import URL, Connection, Engine, Table, create_engine, delete, event, insert, inspect, select, update
from sqlalchemy.exc import SQLAlchemyError

from schemas import events as e
from schemas.envelope import Event
from schemas.errors import EnvironmentMissing
from schemas.records import FrozenTree
from services.trajectories import tables as t

PROJECTED = (
    e.GroupDispatched,
    e.GroupReady,
    e.GroupMaterialized,
    e.GroupClaimed,
    e.GroupConsumed,
    e.GroupDiscarded,
    e.ExecutionDispatched,
    e.ExecutionFinished,
    e.ExecutionSealed,
    e.ExecutionTreeFrozen,
    e.ExecutionSettled,
    e.MeasurementOpened,
    e.MeasurementClosed,
)
"""Data of the events that leave something in the tables."""

_TABLES = (t.groups, t.executions, t.measurements, t.nodes, t.rows)


class Rows(Protocol):
    """What the service asks of it; `Store` over a database, something quicker in a simulation."""

    def position(self) -> int: ...

    def apply(self, said: Event, tree: FrozenTree | None = None) -> None: ...

    def tree(self, execution: str) -> dict[str, Any] | None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class Store:
    """`url` is SQLAlchemy's. Raises EnvironmentMissing for a database that cannot be opened or written."""

    def __init__(self, url: str | URL, run: str) -> None:
        self.run = run
        with self._mapped("trajectories.database"):
            self._engine: Engine = create_engine(url)
        self._where = self._engine.url.render_as_string(hide_password=True)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _tune_sqlite)
        self._open()

    def __repr__(self) -> str:
        return f"<Store {self._where} [run {self.run}]>"

    def close(self) -> None:
        self._engine.dispose()

    def position(self) -> int:
        """LOG sequence to go on after; 0 in an empty database."""
        with self._begin() as db:
            return db.execute(select(t.projections.c.position).where(t.projections.c.run == self.run)).scalar() or 0

    def reset(self) -> None:
        """Forgets everything of this run."""
        with self._begin() as db:
            for table in (*_TABLES, t.projections):
                db.execute(delete(table).where(table.c.run == self.run))

    def apply(self, said: Event, tree: FrozenTree | None = None) -> None:
        """One event of `PROJECTED`; `tree` goes with `execution.tree-frozen` where there is one."""
        with self._begin() as db:
            known = db.execute(select(t.projections.c.position).where(t.projections.c.run == self.run)).scalar() or 0
            if said.seq > known:
                self._project(db, said, tree)
                self._put(db, t.projections, {"run": self.run}, schema=t.SCHEMA, position=said.seq)

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """All rows of this run by table, in the order of their keys: for comparison and export."""
        found: dict[str, list[tuple[Any, ...]]] = {}
        with self._begin() as db:
            for table in (*_TABLES, t.projections):
                chosen = select(table).where(table.c.run == self.run).order_by(*table.primary_key.columns)
                found[table.name] = [tuple(row) for row in db.execute(chosen)]
        return found

    def tree(self, execution: str) -> dict[str, Any] | None:
        """One execution with its nodes in counts and its admitted rows; None for an unknown one."""
        with self._begin() as db:
            head = db.execute(select(t.executions).where(*self._key(t.executions, id=execution))).mappings().first()
            if head is None:
                return None
            nodes = db.execute(
                select(t.nodes).where(*self._key(t.nodes, execution=execution)).order_by(t.nodes.c.node)
            ).mappings()
            rows = db.execute(
                select(t.rows).where(*self._key(t.rows, execution=execution)).order_by(t.rows.c.draw)
            ).mappings()
            return {
                **{name: value for name, value in head.items() if name not in ("run", "id")},
                "execution": execution,
                "nodes": [_node(row) for row in nodes],
                "rows": [
                    {
                        **{name: row[name] for name in ("draw", "leaf", "tokens", "targets")},
                        "target_nodes": np.frombuffer(row["target_nodes"], "<i4").tolist(),
                    }
                    for row in rows
                ],
            }

    def _project(self, db: Connection, said: Event, tree: FrozenTree | None) -> None:
        entity = said.entity
        match said.data:
            case e.GroupDispatched() as data:
                self._put(db, t.groups, {"id": entity}, task=data.task, version=data.version, state="dispatched")
                for member, execution in enumerate(data.executions):
                    key = {"id": execution}
                    self._put(db, t.executions, key, group=entity, measurement="", member=member, task=data.task)
            case e.ExecutionDispatched() as data:
                # All others have their rows from their group.
                if data.measurement:
                    self._put(
                        db,
                        t.executions,
                        {"id": entity},
                        group="",
                        measurement=data.measurement,
                        member=data.member,
                        task=data.task,
                    )
            case e.MeasurementOpened() as data:
                self._put(db, t.measurements, {"id": entity}, version=data.version)
            case e.MeasurementClosed() as data:
                self._set(
                    db,
                    t.measurements,
                    {"id": entity},
                    mean=data.mean,
                    std=data.std,
                    valid=data.valid,
                    placeholder=data.placeholder,
                    excluded=data.excluded,
                )
            case e.GroupReady() as data:
                self._set(db, t.groups, {"id": entity}, state="ready", mean=data.mean, std=data.std)
                for reward in data.rewards:
                    self._set(db, t.executions, {"id": reward.execution}, advantage=reward.advantage)
            case e.GroupMaterialized() as data:
                self._set(db, t.groups, {"id": entity}, state="materialized")
                for row in data.rows:
                    self._put(
                        db,
                        t.rows,
                        {"execution": row.execution, "draw": row.draw},
                        leaf=row.leaf,
                        tokens=row.tokens,
                        targets=row.targets,
                        target_nodes=_int32(row.target_nodes),
                    )
            case e.GroupClaimed() as data:
                self._set(db, t.groups, {"id": entity}, state="claimed", batch=data.batch)
            case e.GroupConsumed() as data:
                self._set(db, t.groups, {"id": entity}, state="consumed", batch=data.batch, staleness=data.staleness)
            case e.GroupDiscarded():
                self._set(db, t.groups, {"id": entity}, state="discarded")
            case e.ExecutionFinished() as data:
                self._set(
                    db,
                    t.executions,
                    {"id": entity},
                    attempt=data.attempt,
                    reason=data.reason,
                    seconds=data.seconds,
                )
            case e.ExecutionSealed() as data:
                self._set(db, t.executions, {"id": entity}, records=data.records)
            case e.ExecutionTreeFrozen() as data:
                self._set(db, t.executions, {"id": entity}, tree=data.blob)
                db.execute(delete(t.nodes).where(*self._key(t.nodes, execution=entity)))
                if tree is not None and tree.nodes:
                    db.execute(insert(t.nodes), self._node_rows(tree))
            case e.ExecutionSettled() as data:
                self._set(
                    db,
                    t.executions,
                    {"id": entity},
                    outcome=data.outcome,
                    outcome_reason=data.reason,
                    reward=data.reward,
                    evaluation=data.evaluation,
                )

    def _node_rows(self, tree: FrozenTree) -> list[dict[str, Any]]:
        return [
            {
                "run": self.run,
                "execution": tree.execution,
                "node": index,
                "call": node.call,
                "parent": node.parent,
                "role": node.role,
                "trainable": node.trainable,
                "temperature": node.temperature,
                "input_ids": _int32(node.input_ids),
                "output_ids": _int32(node.output_ids),
                "logprobs": np.asarray(node.logprobs, "<f4").tobytes(),
                "versions": _int32(value for span in node.versions for value in (span.version, span.start, span.end)),
            }
            for index, node in enumerate(tree.nodes)
        ]

    def _set(self, db: Connection, table: Table, key: dict[str, Any], **values: Any) -> int:
        return db.execute(update(table).where(*self._key(table, **key)).values(values)).rowcount

    def _put(self, db: Connection, table: Table, key: dict[str, Any], **values: Any) -> None:
        # Portable upsert: there is one writer, so nothing comes between the two statements.
        if not self._set(db, table, key, **values):
            db.execute(insert(table).values({"run": self.run, **key, **values}))

    def _key(self, table: Table, **key: Any) -> list[Any]:
        return [table.c[name] == value for name, value in {"run": self.run, **key}.items()]

    def _open(self) -> None:
        with self._begin() as db:
            if inspect(db).has_table(t.projections.name):
                # Another version's tables may have other columns, so they go as a whole; each run fills its own again.
                if set(db.execute(select(t.projections.c.schema)).scalars()) - {t.SCHEMA}:
                    t.metadata.drop_all(db)
            t.metadata.create_all(db)

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        with self._mapped(self._where), self._engine.begin() as db:
            yield db

    @contextmanager
    def _mapped(self, where: str) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, ImportError) as error:  # a driver that isn't installed
            raise EnvironmentMissing(
                f"the database cannot be used: {error}",
                where=where,
                remedy="check trajectories.database and its disk; it can be dropped, it fills again from LOG",
            ) from error


def _tune_sqlite(connection: Any, _: Any) -> None:
    # Readers don't wait for the writer; a power failure may cost the last rows, which come back from LOG.
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()


def _int32(values: Iterable[int]) -> bytes:
    return np.asarray(list(values), "<i4").tobytes()


def _node(row: Any) -> dict[str, Any]:
    output = len(row["output_ids"]) // 4
    return {
        **{name: row[name] for name in ("node", "call", "parent", "role", "trainable", "temperature")},
        "input_tokens": len(row["input_ids"]) // 4,
        "output_tokens": output,
        "trainable_tokens": output if row["trainable"] else 0,
        "versions": sorted({int(version) for version in np.frombuffer(row["versions"], "<i4")[::3]}),
    }
