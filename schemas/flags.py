"""Decision flags: what a run's deciders may do that those of earlier versions did not.

`run.started` records the flags of the code that began the run, and they hold to its end, whatever code goes on with it. A
decider that learns to decide something new asks for a flag of its own, so it takes the old path for a log without it: such a
log replays without a difference, and a run that was begun before an upgrade can be gone on with after it.

A flag is never taken out while a log without it is worth a replay; `tests/golden/` holds logs of each kind.
"""

from __future__ import annotations

HELD = "cell.held"
REASONS = "reasons"

FLAGS: dict[str, str] = {
    HELD: "the scheduler says what keeps the next cell from training, whenever that changes",
    REASONS: "every decision of the scheduler carries the inequalities that allowed it, not only placements and changes of role",
}
"""Flag to what is decided with it and not without."""

NEWEST = sorted(FLAGS)
"""What a run that begins now records."""
