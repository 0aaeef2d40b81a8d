"""One parameter over a range: its table, and its picture."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from replay.logfile import BadLogFile
from replay.simulator.play import Stalled
from replay.whatif.continuation import Continuation
from replay.whatif.parameters import points
from replay.whatif.plot import svg
from replay.whatif.report import Asked
from replay.whatif.sweep import sweep
from schemas.config import Config
from schemas.errors import ConfigError
from services.cli.what_if_command import swept_lines
from tests.replay.whatif.simulated import configured, recorded

SVG = "{http://www.w3.org/2000/svg}"


def test_each_value_is_what_it_is_asked_alone() -> None:
    _, asked = recorded()
    found = sweep(asked, *points("rho_min=0.125,0.9"))
    assert [(each.value, each.recorded) for each in found.points] == [(0.125, True), (0.9, False)]
    assert found.points[0] == found.recorded and found.world_pct == 0.0
    alone = asked.answer(configured("run.scheduler.rho_min=0.9"))
    point, last = found.points[1], alone.steps[-1]
    assert last.what_if_s is not None and last.recorded_s is not None
    assert point.last_step_h == pytest.approx(last.what_if_s / 3600)
    assert point.change_pct == pytest.approx(100 * (last.what_if_s / last.recorded_s - 1))
    assert (point.shared, point.drawn) == (alone.shared, last.drawn)


def test_a_value_that_goes_with_nothing_is_a_row_that_says_so() -> None:
    _, asked = recorded()
    found = sweep(asked, *points("strategy=colocate,async"))
    assert [bool(each.refused) for each in found.points] == [False, True]
    drawn = ElementTree.fromstring(svg(found))
    assert len(drawn.findall(f"{SVG}circle")) == 3
    with pytest.raises(ConfigError, match="trainable"):
        sweep(asked, *points("strategy=async"))


def test_a_value_that_comes_to_no_end_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = recorded()
    play = Asked.play

    def limited(self: Asked, config: Config, *, from_seq: int = 0) -> Continuation:
        if config.scheduler.mu == 2:
            raise Stalled("nothing is left to happen and the run is not over")
        return play(self, config, from_seq=from_seq)

    monkeypatch.setattr(Asked, "play", limited)
    found = sweep(asked, *points("mu=1:3:1"))
    assert [each.refused for each in found.points] == ["", "nothing is left to happen and the run is not over", ""]
    assert any(line.endswith("2: nothing is left to happen and the run is not over") for line in swept_lines(found, "a"))
    with pytest.raises(Stalled):
        sweep(asked, *points("mu=2"))


def test_the_picture_shows_every_point_and_the_recording() -> None:
    _, asked = recorded()
    found = sweep(asked, *points("mu=1:3:1"))
    drawn = ElementTree.fromstring(svg(found))
    words = [each.text for each in drawn.iter(f"{SVG}text")]
    assert {
        "hours to step 6",
        "idle cell-hours",
        "mean staleness",
        "scheduler.mu",
        "as recorded, scheduler.mu = 3",
    } <= set(words)
    assert {"1", "2", "3"} <= set(words)
    assert len(drawn.findall(f"{SVG}circle")) == 9
    assert len([each for each in drawn.iter(f"{SVG}path") if each.get("class") == "was"]) == 4


def test_a_log_that_does_not_replay_is_not_asked() -> None:
    """Its own parameters lead elsewhere: what another parameter changes could not be told from that."""
    events, _ = recorded("run.scheduler.rho_min=0.9")
    other = [
        msgspec.structs.replace(events[0], data=msgspec.structs.replace(events[0].data, config=configured())),
        *events[1:],
    ]
    asked = Asked(other)
    for config in (asked.config, configured("run.scheduler.rho_min=0.5")):
        with pytest.raises(BadLogFile, match="decides otherwise on sequence"):
            asked.answer(config)
