"""State of the outcome decider. Mutable, goes through MessagePack, and bounded: it holds open groups only."""

from __future__ import annotations

import sys

import msgspec

from schemas.events import EvaluationScored, ExecutionFinished, ExecutionSettled
from schemas.units import RowPlan
from services.trajectories.core.advantages import Kind


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """What admission made of an execution's frozen tree."""

    attempt: int
    intact: bool
    """False when the records were not what the seal promised: there is no tree then."""
    rows: list[RowPlan]


class Member(msgspec.Struct, kw_only=True):
    """One execution of an open group: what is known of it so far."""

    started_us: int | None = None
    """Stored time of its first start: its budget runs from there, also over later attempts."""
    lost: int = -1
    """Newest attempt that was lost: what is still said of it and of those before counts for nothing."""
    finished_us: int = 0
    finished: ExecutionFinished | None = None
    tries: int = 0
    """Evaluations requested."""
    failed_us: int | None = None
    """When the newest try failed; None while it runs."""
    scored: EvaluationScored | None = None
    tree: Tree | None = None
    settled: ExecutionSettled | None = None
    """Once set, only this and the rows of `tree` are kept."""


class Group(msgspec.Struct, kw_only=True):
    """An open group: dispatched, neither materialized nor discarded. A held-out execution stands alone in one."""

    task: str
    task_digest: str
    executions: list[str]
    """In the order of dispatch, which is the order of everything said about the group."""
    members: dict[str, Member]


class State(msgspec.Struct, kw_only=True):
    seed: int = 0
    N: int = sys.maxsize
    """Executions of a group that count. A snapshot of before does not say it: there all of them do."""
    limit: int = 5
    """J_max."""
    advantage: Kind = "mean_std"
    budget_us: int = 0
    """Overall time-out of an execution."""
    newest: str = ""
    """Group dispatched last: one that isn't newer and isn't open was closed before."""
    groups: dict[str, Group] = {}
    cancelled: dict[str, int] = {}
    """Surplus executions of closed groups that have not finished, and the newest attempt of each that was lost."""
    newest_held_out: str = ""
    """Held-out execution dispatched last."""
    held_out: dict[str, Group] = {}
    """By execution: held-out ones that are not settled."""
