"""The picture of a run: well-formed, complete, and true to the events."""

from __future__ import annotations

from xml.etree import ElementTree

from replay.simulator.run import Simulation
from replay.timeline import COLOURS, ROWS, TOP, Timeline, draw
from tests.replay.simulator.small import small


def test_picture_shows_cells_steps_and_levels() -> None:
    simulation = Simulation(small(), seed=1, keep=True)
    outcome = simulation.run()
    text = draw(simulation.events, title="small & <quick>")
    tree = ElementTree.fromstring(text)
    words = {each.text for each in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"small & <quick>", "cell-0 (core)", "cell-1", "cell-2", "cell-3", "hours since the start"} <= words
    fills = [each.get("fill") for each in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert {COLOURS["rollout"], COLOURS["train"], COLOURS["moving"]} <= set(fills)
    assert str(outcome.steps) in words


def test_lanes_follow_each_other_without_a_gap_and_levels_end_with_what_is_left() -> None:
    timeline = Timeline("small")
    Simulation(small(), seed=2, watchers=[timeline.see]).run()
    timeline.svg()
    for lane in timeline.lanes.values():
        assert all(before.end_us == after.start_us for before, after in zip(lane.spans, lane.spans[1:], strict=False))
    assert [step for _, step in timeline.steps] == list(range(1, 7))
    assert len(timeline.publications) == 2
    assert min(value for _, value in timeline.level) >= 0


def test_picture_of_many_cells_is_no_higher_than_a_screen() -> None:
    """Sixty-four rows, of which every second is named."""
    timeline = Timeline("many")
    cells = ["run.cells.count=64", "run.cells.capacity=2", "run.cells.trainable=64", "world.cell_nodes=0.25"]
    Simulation(small(*cells), seed=1, watchers=[timeline.see]).run()
    tree = ElementTree.fromstring(timeline.svg())
    assert float(tree.get("height") or 0) < TOP + ROWS + 320
    words = [each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert [word for word in words if word.startswith("cell-")] == [
        "cell-0 (core)" if index == 0 else f"cell-{index}" for index in range(0, 64, 2)
    ]
