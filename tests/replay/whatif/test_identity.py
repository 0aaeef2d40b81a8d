"""Unchanged parameters give the recording back: followed to its end, and made again by the recorded world alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.logfile import read_events
from replay.whatif.report import Asked
from schemas.envelope import Event
from tests.replay.whatif.simulated import WAYS, recorded

LOGS = Path(__file__).parents[2] / "golden"
GOLDEN = LOGS / "quickstart-elastic.gyre"


@pytest.fixture(scope="module")
def golden() -> list[Event]:
    return read_events(GOLDEN)


@pytest.mark.parametrize("way", WAYS)
def test_every_event_is_the_recorded_one_at_its_time(way: str) -> None:
    events, asked = recorded(*WAYS[way])
    found = asked.play(asked.config)
    assert found.parting is None
    assert found.events == events
    assert found.shared == len(events)


@pytest.mark.parametrize("way", WAYS)
def test_the_recorded_world_alone_makes_every_event_again(way: str) -> None:
    """Nothing is followed: from the first event on all facts are the world's."""
    events, asked = recorded(*WAYS[way])
    found = asked.play(asked.config, from_seq=1)
    assert found.shared == 1
    assert found.events == events


@pytest.mark.parametrize("seq", [2, 120, 400, 988, 1500, 2400])
def test_the_world_takes_over_anywhere(seq: int) -> None:
    """Whatever is in flight then ends when it did."""
    events, asked = recorded()
    found = asked.play(asked.config, from_seq=seq)
    # A decision can't be the place: its input is.
    assert seq <= found.shared <= seq + 250
    assert found.events == events


def test_a_real_run_is_given_back(golden: list[Event]) -> None:
    asked = Asked(golden)
    found = asked.play(asked.config)
    assert found.parting is None
    assert found.events == golden


@pytest.mark.parametrize("path", sorted(LOGS.glob("simulated/*.gyre")), ids=lambda path: path.stem)
def test_every_log_that_is_kept_is_given_back(path: Path) -> None:
    events = read_events(path)
    asked = Asked(events)
    assert asked.play(asked.config).events == events


def test_the_world_of_a_real_run_comes_near_it_alone(golden: list[Event]) -> None:
    """What two processes took to hear of each other differs each time: here it is the median of the recording."""
    asked = Asked(golden)
    recorded_s, world_s = asked.recorded().steps_s, asked.world(1)
    assert recorded_s.keys() == world_s.keys()
    assert max(abs(world_s[step] / recorded_s[step] - 1) for step in recorded_s) < 0.06


@pytest.mark.parametrize("events", [700, 1203, 2000])
def test_a_log_that_ends_in_mid_run_is_given_back(events: int) -> None:
    whole, _ = recorded()
    part = whole[:events]
    asked = Asked(part)
    found = asked.play(asked.config)
    assert found.parting is None
    assert found.events == part
