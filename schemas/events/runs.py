"""Events of the run as a whole: its state, its services, its timers."""

from __future__ import annotations

from typing import Literal

from schemas.config import Config
from schemas.units import Check, TaskRef, Value

# run


class RunStarted(Value, frozen=True, kw_only=True):
    seed: int
    config: Config
    tasks: list[TaskRef]
    """In the order of their names; which task a group gets is drawn from the seed."""
    held_out: list[TaskRef] = []
    """Tasks that are measured on and never trained on; empty when nothing is measured."""
    code: str
    """Identity of the code: package version and, where known, the commit."""
    flags: list[str] = []
    """Decision flags (`schemas.flags`): a later version of a decider takes the old path for a log without its flag."""


class RunFinished(Value, frozen=True, kw_only=True, omit_defaults=True):
    steps: int
    reason: Literal["steps_done", "stopped"]
    checks: list[Check] = []
    """What made it the end; none where an operator stopped the run."""


class RunContinued(Value, frozen=True, kw_only=True):
    code: str
    """Identity of the code that goes on."""


class RunPaused(Value, frozen=True, kw_only=True):
    by: str


class RunResumed(Value, frozen=True, kw_only=True):
    by: str


# service


class ServiceJoined(Value, frozen=True, kw_only=True):
    url: str
    """Where the service answers HTTP: health, readiness, metrics and what else it serves."""
    pid: int


class ServiceLeft(Value, frozen=True, kw_only=True):
    reason: str


# timer


class TimerSet(Value, frozen=True, kw_only=True, omit_defaults=True):
    purpose: str
    due_us: int
    reason: list[Check] = []


class TimerFired(Value, frozen=True, kw_only=True):
    purpose: str
