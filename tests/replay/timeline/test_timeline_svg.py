"""The picture: well-formed, names every cell, true to the document, and its axes are for people."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest

from replay.simulator.run import Simulation
from replay.timeline import Document, fold
from replay.timeline.axis import nice, ticks, written
from replay.timeline.model import CellRow, Changes, SeriesRow
from replay.timeline.svg import LEFT, RIGHT, ROWS, TOP, WIDTH, draw, waterlevel
from tests.replay.simulator.small import small

SVG = "{http://www.w3.org/2000/svg}"
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000


@pytest.fixture(scope="module")
def document() -> Document:
    simulation = Simulation(small(), seed=1, keep=True)
    simulation.run()
    return fold(simulation.events, title="small & <quick>")


def _words(tree: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in tree.iter(f"{SVG}text")]


def test_it_names_every_cell_step_and_line(document: Document) -> None:
    tree = ElementTree.fromstring(draw(document))
    words = _words(tree)
    assert {"small & <quick>", "cell-0 (core)", "cell-1", "cell-2", "cell-3", "waterlevel w = d - f", "rho_min B = 1"} <= set(words)
    assert "6" in words
    kinds = {each.get("class") for each in tree.iter()}
    assert {"rollout", "training", "training-next", "idle", "leaving", "returning"} <= kinds
    assert {"step", "publication", "level", "capacity", "ready", "supply", "bound"} <= kinds


@pytest.mark.parametrize(("count", "named"), [(8, 8), (64, 64), (200, 50)])
def test_rows_fit_a_screen_and_their_names_do_not_overlap(count: int, named: int) -> None:
    cells = [CellRow(name=f"cell-{index}", index=index, pool=False, capacity=1) for index in range(count)]
    series = [SeriesRow(name="role", cell=index) for index in range(count)]
    changes = Changes(seq=list(range(count)), t=[0] * count, series=list(range(count)), value=[0] * count)
    tree = ElementTree.fromstring(draw(Document(end=1000, cells=cells, series=series, changes=changes)))
    heights = [float(each.get("y", "0")) for each in tree.iter(f"{SVG}text") if (each.text or "").startswith("cell-")]
    bars = [each for each in tree.iter(f"{SVG}rect") if each.get("class") == "rollout" and each.get("width") != "16"]
    assert (len(heights), len(bars)) == (named, count)
    assert float(tree.get("height", "0")) < TOP + ROWS + 400
    assert all(after - before >= 10 for before, after in itertools.pairwise(heights))


def test_a_log_in_which_nothing_happened_yet_is_drawn() -> None:
    assert "nothing yet" in _words(ElementTree.fromstring(draw(Document(title="nothing yet"))))


def test_nothing_lies_outside_the_picture(document: Document) -> None:
    tree = ElementTree.fromstring(draw(document))
    height = float(tree.get("height", "0"))
    for bar in tree.iter(f"{SVG}rect"):
        x, y = float(bar.get("x", "0")), float(bar.get("y", "0"))
        assert 0 <= x and x + float(bar.get("width", "0")) <= WIDTH
        assert 0 <= y and y + float(bar.get("height", "0")) <= height
    for path in tree.iter(f"{SVG}path"):
        drawn = path.get("d", "")
        assert re.match(r"M-?[\d.]+ -?[\d.]+", drawn), drawn
        assert all(0 <= float(each) <= WIDTH for each in re.findall(r"[HM](-?[\d.]+)", drawn))


def test_the_waterlevel_is_what_was_dispatched_less_what_finished(document: Document) -> None:
    w = waterlevel(document.values("d"), document.values("f"))
    assert min(value for *_, value in w) >= 0
    assert w[-1][2] == document.values("d")[-1][2] - document.values("f")[-1][2]
    assert [each[1] for each in w] == sorted(each[1] for each in w)


def test_micro_steps_wide_enough_are_apart(document: Document) -> None:
    """As many bars in the core's row as there are wide micro-steps, and none of a batch in the tone of the next."""
    made = [row for row in document.values("micro_step", 0) if row[2] >= 0]
    tree = ElementTree.fromstring(draw(document))
    first = min(float(each.get("y", "0")) for each in tree.iter(f"{SVG}rect") if each.get("class") == "idle" and each.get("width") != "16")
    bars = [each for each in tree.iter(f"{SVG}rect") if each.get("y") == f"{first:g}" and (each.get("class") or "").startswith("training")]
    assert 0 < len(bars) <= len(made)
    scale = (WIDTH - LEFT - RIGHT) / document.end
    assert float(bars[0].get("x", "0")) == pytest.approx(LEFT + made[0][0] * scale, abs=0.1)


def test_a_hundred_thousand_events_are_no_larger_than_a_picture_needs(document: Document) -> None:
    rows = 100_000
    series = [SeriesRow(name="d"), SeriesRow(name="f"), SeriesRow(name="ready")]
    changes = Changes(
        seq=list(range(rows)), t=list(range(rows)), series=[n % 3 for n in range(rows)], value=[n // 3 for n in range(rows)]
    )
    assert len(draw(Document(end=rows, series=series, changes=changes))) < 200_000


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (50_000, ["0", "5 s", "10 s", "15 s", "20 s", "25 s", "30 s", "35 s", "40 s", "45 s", "50 s"]),
        (200_000, ["0", "30 s", "1 min", "1 min 30", "2 min", "2 min 30", "3 min"]),
        (75 * MINUTE, ["0", "10 min", "20 min", "30 min", "40 min", "50 min", "1 h", "1 h 10"]),
        (16 * HOUR, ["0", "2 h", "4 h", "6 h", "8 h", "10 h", "12 h", "14 h", "16 h"]),
        (75 * HOUR, ["0", "12 h", "24 h", "36 h", "48 h", "60 h", "72 h"]),
        (9 * DAY, ["0", "1 d", "2 d", "3 d", "4 d", "5 d", "6 d", "7 d", "8 d", "9 d"]),
    ],
)
def test_times_are_written_for_people(end: int, expected: list[str]) -> None:
    assert [text for _, text in ticks(0, end, 12)] == expected


def test_times_inside_an_hour_and_numbers() -> None:
    assert written(HOUR + 5 * MINUTE + 7000, 1000) == "1:05:07 h"
    assert [nice(each) for each in (0.3, 1, 3, 70)] == [0.5, 1, 5, 100]
