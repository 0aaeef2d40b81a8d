"""Who is killed when, for `gyre run FILE --chaos SEED`: pure, from a seed.

    first half of the bursts before the last        second half             last burst
    |--piece 1--|--piece 2--| ... |--piece n--|------------------------------|----------
         kill 1      kill 2            kill n         ^ the run waits here for kill n

Invariants
- every process once; the same seed and processes give the same moments;
- moments are spread evenly over the first half of what comes before the last burst, each anywhere in a piece of its own;
- the run has twice the progress that a kill's piece ends at before it is held back: whoever was killed needs time to
  come back, and the next is killed no earlier;
- a kill that is late comes a drawn part of a piece after the one before is back, so that it meets a run at work;
- the last hold lies where the last burst begins, so nothing is outstanding when the run ends. A run of one burst has
  its moments in the first quarter of its steps and its last hold in their middle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import msgspec

EVENTS_AN_EXECUTION = 12
"""About so many lines of the log does one execution make, its group's and its batch's among them."""

SPREAD = 0.5
"""Part of the run before its last hold over which moments are spread."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One process to kill."""

    process: str
    at: float
    """Moment, in steps: 2.4 is in the third step, when about two fifths of its events are in the log."""
    hold: float
    """Moment, in steps, from which on the run is held back until this process was killed and is ready again."""
    gap: float
    """Steps that the run makes before it once the one before is back, as far as the last hold leaves room."""


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to one process, and how the mesh took it."""

    process: str
    at_step: int
    """Steps done before it."""
    at_sequence: int
    """Last sequence of LOG that was read before it."""
    ready_after_s: float | None = None
    """Seconds until every process was ready again; None when that was not seen."""


def plan(processes: Iterable[str], *, seed: int, steps: int, mu: int) -> list[Kill]:
    """Moments for all processes, rising, for a run of `steps` steps in bursts of `mu`.

    The order of `processes` doesn't matter."""
    order = sorted(set(processes))
    random.Random(f"{seed}:order").shuffle(order)
    end = last_hold(steps=steps, mu=mu)
    span = SPREAD * end
    below = math.nextafter(span, 0.0)
    return [
        Kill(
            process=name,
            at=min(below, span * (index + random.Random(f"{seed}:{name}").random()) / len(order)),
            hold=end * (index + 1) / len(order),
            gap=span / len(order) * random.Random(f"{seed}:{name}:gap").random(),
        )
        for index, name in enumerate(order)
    ]


def in_turn(kill: Kill, *, now: float, end: float) -> Kill:
    """The same kill in a run that is at `now` when its turn comes; `end` is the last hold.

    One that is late is made where the run is at work, and the run is held back from that moment on: what was begun goes
    on for a step or so meanwhile, and those that follow must not all meet the last hold."""
    at = min(end, max(kill.at, now + kill.gap))
    return msgspec.structs.replace(kill, at=at, hold=min(end, max(kill.hold, at)))


def last_hold(*, steps: int, mu: int) -> float:
    """Steps after which the run waits for everything outstanding: before the last burst, or inside the only one."""
    return float(steps - mu) if steps > mu else steps / 2


def position(ends: Sequence[int], sequence: int, *, expected: int) -> float:
    """How far a run is, in steps; whole numbers only when a step ends.

    `ends` are the sequences of LOG at which steps ended, `sequence` is the last one, `expected` how many events the
    first step probably makes; later ones are taken to make the mean of those before."""
    done, last = len(ends), ends[-1] if ends else 0
    events = last / done if done else expected
    return min(math.nextafter(done + 1.0, 0.0), done + max(0, sequence - last) / max(1.0, events))
