"""Tables of trajectories: projections of LOG and RECORDS, never a source. Drop them, fill again, get the same rows.

One database may hold several runs, so every key begins with the run. Token arrays lie as little-endian bytes: int32 for
ids, float32 for log-probabilities. Trees are stored as deltas: a node holds only what it adds to its parent.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

SCHEMA = 2
"""Raise it with any change here: a database of another version is dropped and filled again."""

metadata = MetaData()

projections = Table(
    "gyre_projections",
    metadata,
    Column("run", String, primary_key=True),
    Column("schema", Integer, nullable=False),
    Column("position", Integer, nullable=False),  # LOG sequence of the last event that is in the rows
)

groups = Table(
    "gyre_groups",
    metadata,
    Column("run", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("task", String, nullable=False),
    Column("version", Integer, nullable=False),  # v_d
    Column("state", String, nullable=False),  # dispatched, ready, materialized, claimed, consumed, discarded
    Column("mean", Float),
    Column("std", Float),
    Column("batch", String),
    Column("staleness", Integer),
)

executions = Table(
    "gyre_executions",
    metadata,
    Column("run", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("group", String, nullable=False),  # empty for a held-out execution
    Column("measurement", String, nullable=False),  # of a held-out execution; empty for all others
    Column("member", Integer, nullable=False),
    Column("task", String, nullable=False),
    Column("attempt", Integer),
    Column("reason", String),  # how it finished
    Column("seconds", Float),
    Column("records", Integer),
    Column("tree", String),  # blob; empty when there is none
    Column("outcome", String),
    Column("outcome_reason", String),
    Column("reward", Float),
    Column("advantage", Float),
    Column("evaluation", String),
)

measurements = Table(
    "gyre_measurements",
    metadata,
    Column("run", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("mean", Float),
    Column("std", Float),
    Column("valid", Integer),
    Column("placeholder", Integer),
    Column("excluded", Integer),
)

nodes = Table(
    "gyre_nodes",
    metadata,
    Column("run", String, primary_key=True),
    Column("execution", String, primary_key=True),
    Column("node", Integer, primary_key=True),
    Column("call", String, nullable=False),
    Column("parent", Integer, nullable=False),  # -1 at a root
    Column("role", String, nullable=False),
    Column("trainable", Boolean, nullable=False),
    Column("temperature", Float, nullable=False),
    Column("input_ids", LargeBinary, nullable=False),
    Column("output_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", LargeBinary, nullable=False),  # int32 triples: version, start, end
)

rows = Table(
    "gyre_rows",
    metadata,
    Column("run", String, primary_key=True),
    Column("execution", String, primary_key=True),
    Column("draw", Integer, primary_key=True),
    Column("leaf", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("targets", Integer, nullable=False),
    Column("target_nodes", LargeBinary, nullable=False),
)
