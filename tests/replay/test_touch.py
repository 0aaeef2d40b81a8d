"""What a call touches is what it asks for itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from replay.touch import touched


@pytest.fixture
def watched() -> Iterator[list[float]]:
    """Somebody measures every collection of garbage, and there are many."""
    times: list[float] = []

    def watch(phase: str, info: object) -> None:
        times.append(time.perf_counter())

    thresholds = gc.get_threshold()
    gc.callbacks.append(watch)
    gc.set_threshold(10, 1, 1)
    yield times
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(watch)


def act() -> list[list[int]]:
    return [[index] for index in range(1000)]


def test_a_clock_that_is_asked_is_named() -> None:
    def ask() -> float:
        return time.monotonic()

    assert touched(ask).startswith("time.monotonic at tests/replay/test_touch.py:")


def test_who_watches_the_collection_of_garbage_touches_nothing_for_others(watched: list[float]) -> None:
    act()
    assert watched, "nothing was collected"
    assert touched(act) == ""
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        touched(lambda: 1 // 0)
    assert gc.isenabled()
