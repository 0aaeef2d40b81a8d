"""Logs that were recorded once replay for ever: whole, and from any snapshot on."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay import Replayer, read

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.gyre"))


def test_there_are_some() -> None:
    assert GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_recorded_log_replays_without_a_difference(path: Path) -> None:
    result = Replayer().replay(read(path))
    assert result.first is None
    assert result.admission is not None
    assert all(each.recorded and each.same == each.recorded for each in result.deciders)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_from_a_snapshot_in_the_middle_it_ends_in_the_same_bytes(path: Path) -> None:
    """The decider's state at the end, as bytes, and every decision on the way."""
    events = list(read(path))
    places = {len(events) * part // 4 for part in (1, 2, 3)}
    newest: dict[str, bytes] = {}
    snapshots: dict[int, dict[str, bytes]] = {}
    for step in Replayer().steps(events):
        for place in [place for place in places if step.event.seq >= place]:
            snapshots[place] = dict(newest)
            places.discard(place)
        newest[step.decider] = step.snapshot()
    assert len(snapshots) == 3
    for place, known in snapshots.items():
        last = {}
        replayer = Replayer(snapshots=known)
        for step in replayer.steps(events):
            assert step.divergence is None, f"from {place}: {step.divergence}"
            last[step.decider] = step
        # The last step's driver stands at the end of the log.
        assert {name: step.snapshot() for name, step in last.items()} == newest
