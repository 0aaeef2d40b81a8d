"""Why a decision is taken, as data: every decision of the scheduler carries the inequalities that allowed it, both sides.

Placements and changes of role do so in every run; everything else where the run has the flag `reasons`, so that a log of
before is decided again in its own bytes. An `execution.dispatched` has no reason of its own: its group's, or its
measurement's, is said just before.
"""

from __future__ import annotations

from schemas.flags import REASONS
from schemas.units import Check
from services.scheduler.core.state import State


def told(state: State, *checks: Check) -> list[Check]:
    """The checks where the run tells them, none where it was begun before that."""
    return list(checks) if REASONS in state.flags else []
