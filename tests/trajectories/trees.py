"""Trees, records and configurations for the tests of trajectories and packer."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from schemas.config import Config
from schemas.config_file import from_tree
from schemas.events import ExecutionTreeFrozen
from schemas.ids import call_id
from schemas.records import ROLES, CallRecord, VersionSpan


def config(**sections: dict[str, Any]) -> Config:
    return from_tree({"name": "test", "steps": 6, "harness": {"command": ["true"]}, **sections}, where="test")


def record(
    execution: str = "e-000000.00",
    index: int = 0,
    parent: int | None = None,
    *,
    attempt: int = 1,
    inputs: int = 3,
    outputs: int = 2,
    role: str = "main",
    delivered: bool = True,
    version: int = 0,
) -> CallRecord:
    """A call whose token ids say where they come from: call index, then position."""
    base = 1000 * (index + 1)
    return CallRecord(
        call=call_id(execution, attempt, index),
        execution=execution,
        attempt=attempt,
        index=index,
        parent=None if parent is None else call_id(execution, attempt, parent),
        input_ids=list(range(base, base + inputs)),
        output_ids=list(range(base + 500, base + 500 + outputs)),
        logprobs=[-0.125 * (i + 1) for i in range(outputs)],
        versions=[VersionSpan(version=version, start=0, end=outputs)] if outputs else [],
        temperature=0.5 + index,
        finish="stop",
        cell="cell-1",
        role=role,
        request=f"request-{index}",
        prefix=f"prefix-{index}",
        answer=b"[]",
        delivered=delivered,
    )


@st.composite
def frozen_counts(draw: st.DrawFn, *, most: int = 40) -> ExecutionTreeFrozen:
    """Counts of any tree: several roots, any shape, nodes without targets, leaves of every class."""
    size = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    trainable = [draw(st.integers(0, 5)) for _ in range(size)]
    tokens = [draw(st.integers(1, 9)) + count for count in trainable]
    leaves = [i for i in range(size) if i not in parents]
    classes = [draw(st.integers(0, len(ROLES) - 1)) for _ in leaves]
    return ExecutionTreeFrozen(
        attempt=1,
        blob="tree/x",
        digest="d",
        parents=parents,
        tokens=tokens,
        trainable=trainable,
        leaves=leaves,
        classes=classes,
    )
