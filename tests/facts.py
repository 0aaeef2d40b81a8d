"""Events as tests say them: what a service said, with nothing that the test does not care for."""

from __future__ import annotations

from typing import Any

from schemas import events as e
from schemas.envelope import Event
from schemas.units import GapStats


def fact(
    seq: int, owner: str, kind: str, entity: str, data: Any, *, time_us: int = -1, causation: int = 0, id: str = ""
) -> Event:
    """An event of LOG; stored at the time `seq` unless it is said."""
    return Event(
        seq=seq,
        time_us=seq if time_us < 0 else time_us,
        kind=kind,
        entity=entity,
        owner=owner,
        instance=owner,
        causation=causation,
        id=id or str(seq),
        data=data,
    )


def scored(
    execution: str,
    score: float,
    *,
    attempt: int = 1,
    valid: bool = True,
    digest: str = "wd",
    reference: str = "workspace/x",
) -> e.EvaluationScored:
    return e.EvaluationScored(
        execution=execution,
        attempt=attempt,
        score=score,
        valid=valid,
        workspace_digest=digest,
        branch=-1,
        reference=reference,
        seconds=0.1,
    )


def stepped(step: int, **changes: Any) -> e.BatchStepped:
    """The core made a step alone, of one micro-step; `changes` are fields."""
    fields: dict[str, Any] = {
        "version": step,
        "members": ["cell-0"],
        "loss": 0.0,
        "grad_norm": 0.0,
        "lr": 0.0,
        "micro_steps": 1,
        "tokens": 1,
        "targets": 1,
        "executions": 1,
        "masked": 0,
        "reward": 0.0,
        "gap": GapStats(),
        "seconds": 0.1,
    }
    return e.BatchStepped(step=step, **fields | changes)
