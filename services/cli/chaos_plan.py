"""Who is killed when, for `gyre run FILE --chaos SEED`: pure, from a seed.

Invariants: every process once; the same seed and processes give the same moments; moments are spread evenly over the
first half of the run, each anywhere in a piece of its own, and lie before the last step begins (in the only step, when
there is one). The second half is left to those that are late, because whoever was killed needs time to come back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import msgspec

EVENTS_AN_EXECUTION = 12
"""About so many lines of the log does one execution make, its group's and its batch's among them."""


SPREAD = 0.5
"""Part of the steps before the last one over which moments are spread."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One process to kill."""

    process: str
    at: float
    """Moment, in steps: 2.4 is in the third step, when about two fifths of its events are in the log."""


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to one process, and how the mesh took it."""

    process: str
    at_step: int
    """Steps done before it."""
    at_sequence: int
    """Last sequence of LOG that was read before it."""
    ready_after_s: float | None = None
    """Seconds until every process was ready again; None when that was not seen."""


def plan(processes: Iterable[str], *, seed: int, steps: int) -> list[Kill]:
    """Moments for all processes, rising, for a run of `steps` steps. The order of `processes` doesn't matter."""
    order = sorted(set(processes))
    random.Random(f"{seed}:order").shuffle(order)
    span = SPREAD * max(1, steps - 1)
    below = math.nextafter(span, 0.0)
    return [
        Kill(process=name, at=min(below, span * (index + random.Random(f"{seed}:{name}").random()) / len(order)))
        for index, name in enumerate(order)
    ]


def position(ends: Sequence[int], sequence: int, *, expected: int) -> float:
    """How far a run is, in steps; whole numbers only when a step ends.

    `ends` are the sequences of LOG at which steps ended, `sequence` is the last one, `expected` how many events the
    first step probably makes; later ones are taken to make the mean of those before."""
    done, last = len(ends), ends[-1] if ends else 0
    events = last / done if done else expected
    return min(math.nextafter(done + 1.0, 0.0), done + max(0, sequence - last) / max(1.0, events))
