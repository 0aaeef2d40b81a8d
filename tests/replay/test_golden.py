"""Logs that were recorded once replay for ever: whole, and from any snapshot on. Real runs, and every shipped scenario."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replay import Replayer, ReplayResult, read
from replay.checker import check
from schemas.envelope import Event
from tests.golden import simulated

KEPT = sorted(simulated.KEPT.rglob("*.gyre"))


def name_of(path: Path) -> str:
    return str(path.relative_to(simulated.KEPT).with_suffix(""))


def ended(events: list[Event], snapshots: dict[str, bytes] | None = None) -> tuple[ReplayResult, dict[str, bytes]]:
    """What a replay finds, and every decider's state at the end as bytes."""
    replay = Replayer(snapshots=snapshots).begin()
    replay.feed(events)
    for _ in replay.end():
        pass
    return replay.result(), {name: shadow.driver.snapshot() for name, shadow in replay.shadows.items()}


def snapshots_at(events: list[Event], places: list[int]) -> list[dict[str, bytes]]:
    """Of each decider at its first input from each place on."""
    found: list[dict[str, bytes]] = [{} for _ in places]
    for step in Replayer().steps(events):
        for place, snapshots in zip(places, found, strict=True):
            if step.event.seq >= place and step.decider not in snapshots:
                snapshots[step.decider] = step.snapshot()
    return found


def test_every_scenario_and_strategy_is_kept_as_the_table_says() -> None:
    assert simulated.README.read_text().endswith(simulated.table())
    assert {path.stem for path in KEPT if path.parent == simulated.SIMULATED} == set(simulated.SCENARIOS)
    strategies = {next(iter(read(path))).data.config.scheduler.strategy for path in KEPT}
    assert strategies == {"elastic", "async", "colocate"}
    assert sum(path.stat().st_size for path in KEPT) < 3_000_000


@pytest.mark.parametrize("path", KEPT, ids=name_of)
def test_a_recorded_log_replays_without_a_difference_from_anywhere(path: Path) -> None:
    """From snapshots in the middle every decision is the same too, and in the end the same bytes are there."""
    events = list(read(path))
    whole, last = ended(events)
    assert whole.first is None
    assert whole.admission is not None and whole.admission.recorded == whole.admission.same > 0
    assert all(each.recorded == each.same > 0 and not each.unrecorded for each in whole.deciders)
    for snapshots in snapshots_at(events, [len(events) * part // 4 for part in (1, 2, 3)]):
        assert snapshots.keys() == last.keys()
        result, end = ended(events, snapshots)
        assert result.first is None
        assert all(each.recorded == each.same > 0 for each in result.deciders)
        assert end == last


@pytest.mark.parametrize("path", KEPT, ids=name_of)
def test_every_law_holds_on_a_recorded_log(path: Path) -> None:
    report = check(read(path))
    assert report.ok, report.violations[0]


@pytest.mark.parametrize("path", KEPT, ids=name_of)
def test_nothing_of_a_machine_is_in_a_recorded_log(path: Path) -> None:
    text = b"\n".join(each.data for each in read(path).messages()).decode()
    assert not re.findall(r'"/[^"]*', text), "an absolute path"
    assert not re.findall(r"e-\d{6}\.\d{2}~\d+~", text), "a token of an execution"
    assert set(re.findall(r"[a-z]+://([^:/\"]+)", text)) <= {"127.0.0.1"}
