"""Time and number axes: where ticks stand, and what is written at them. Times are milliseconds since the start."""

from __future__ import annotations

_S, _MIN, _H, _D = 1000, 60_000, 3_600_000, 86_400_000
STEPS = (
    *(n * _S for n in (1, 2, 5, 10, 15, 30)),
    *(n * _MIN for n in (1, 2, 5, 10, 15, 30)),
    *(n * _H for n in (1, 2, 3, 6, 12)),
    *(n * _D for n in (1, 2, 5, 10, 20, 50, 100)),
)


def ticks(start: int, end: int, most: int) -> list[tuple[int, str]]:
    """At most about `most` round times from start to end, and what is written at each."""
    step = next((each for each in STEPS if (end - start) / each <= most), STEPS[-1])
    first = -(-start // step) * step
    return [(at, written(at, step)) for at in range(first, end + 1, step)]


def written(t: int, step: int) -> str:
    """A time as exactly as the step between ticks needs: 40 s, 5 min, 1 h 30, 36 h, 5 d."""
    hours, minutes, seconds = t // _H, t // _MIN % 60, t // _S % 60
    if t == 0:
        return "0"
    if step >= _D:
        return f"{t // _D} d"
    if step >= _H:
        return f"{hours} h"
    if step >= _MIN:
        return (f"{hours} h {minutes:02d}" if minutes else f"{hours} h") if hours else f"{minutes} min"
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d} h"
    return (f"{minutes} min {seconds:02d}" if seconds else f"{minutes} min") if minutes else f"{seconds} s"


def nice(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below."""
    power = 1e-6
    while power * 10 <= least:
        power *= 10
    return round(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least or factor == 10), 6)
