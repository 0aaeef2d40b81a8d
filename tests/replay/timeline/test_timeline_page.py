"""The page: whole in one file, and what its script shows, steps to and finds is what the log says."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.invariants.folding import apply
from replay.invariants.scene import Scene
from replay.simulator.run import Simulation
from replay.timeline import Document, Tracks, fold, html
from replay.timeline.axis import ticks
from replay.timeline.model import ROLES
from replay.timeline.notes import duration
from schemas.envelope import Event
from schemas.kinds import is_decision
from tests.replay.simulator.small import small

BROWSER = Path(__file__).with_name("browser.js")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's script")
Answers = list[dict[str, Any]]
Browse = Callable[..., Answers]


@pytest.fixture(scope="module")
def log() -> list[Event]:
    simulation = Simulation(small(), seed=1, keep=True)
    simulation.run()
    return simulation.events


@pytest.fixture(scope="module")
def document(log: list[Event]) -> Document:
    return fold(log, title="small </script> & <quick>")


@pytest.fixture(scope="module")
def page(document: Document) -> str:
    return html.page(document)


@pytest.fixture
def browse(page: str, tmp_path: Path) -> Browse:
    """Does things on the page, and answers what it shows after each."""
    file = tmp_path / "page.html"

    def run(*steps: list[Any], address: str = "", page: str = page) -> Answers:
        file.write_text(page)
        done = subprocess.run(
            ["node", str(BROWSER), str(file), address],
            input=json.dumps(steps),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        answers: Answers = json.loads(done.stdout)
        assert all(each["drawn"]["bad"] == 0 for each in answers), "a number that is none, or a colour, was drawn"
        return answers

    return run


def test_the_page_has_the_data_and_no_address(page: str, document: Document) -> None:
    packed = re.search(r'id="data">([^<]*)<', page)
    assert packed is not None
    assert html.unpack(packed[1]) == document
    rest = page.replace(packed[1], "")
    assert not re.search(r"(https?:)?//[\w.-]+\.\w|\bsrc=|<link|@import|url\(|fetch\(|XMLHttp|WebSocket|import\(", rest)
    assert "default-src 'none'" in page
    assert "<title>small &lt;/script&gt; &amp; &lt;quick&gt;</title>" in page
    assert page.count("</script>") == 3


def test_no_placeholder_is_left_and_every_colour_is_there(page: str) -> None:
    assert not re.search(r"@(title|style|data|script|meaning)@", page)
    named = set(re.findall(r"var\(--([\w-]+)\)", page))
    for ground in re.findall(r":root[^{]*\{([^}]*)\}", page):
        assert named <= set(re.findall(r"--([\w-]+):", ground))


def test_a_long_runs_page_is_small(page: str, document: Document) -> None:
    """Some 11 bytes an event, so that a hundred thousand stay far below 5 MB."""
    bare = len(html.page(Document(title="nothing")))
    assert bare < 60_000
    assert (len(page) - bare) / len(document.events.seq) < 15


@needs_node
def test_the_script_says_what_the_scene_says(browse: Browse, log: list[Event]) -> None:
    asked = [log[index].seq for index in range(200, len(log), 311)]
    answers = browse(*[["ask", f"JSON.stringify(timeline.model.at({seq}))"] for seq in asked])
    scene, told = Scene(), dict(zip(asked, answers, strict=True))
    for event in log:
        apply(scene, event)
        if event.seq not in told:
            continue
        state = json.loads(told[event.seq]["said"])
        assert [state[name] for name in ("d", "p", "f", "w", "ready")] == [scene.d, scene.p, scene.f, scene.d - scene.f, len(scene.ready)]
        assert state["C_R"] == scene.served_capacity() and state["batch"] == scene.batch
        for cell in state["cells"]:
            seen = scene.cells[cell["name"]]
            assert (cell["load"], cell["epoch"], cell["version"]) == (seen.load, seen.epoch, seen.version)
            assert (cell["role"] in ("rollout", "away")) == (seen.place == "serving")


@needs_node
def test_keys_step_through_events_decisions_and_role_changes(browse: Browse, log: list[Event]) -> None:
    shift, alt = {"shiftKey": True}, {"altKey": True}
    keys = [["ArrowRight"], ["ArrowRight", shift], ["ArrowRight", alt], ["ArrowLeft", alt], ["ArrowLeft"], ["Home"], ["ArrowLeft"], ["End"]]
    answers = browse(*[["key", *key] for key in keys], address="#seq=1500")
    decided = next(each.seq for each in log if each.seq > 1501 and is_decision(each.kind, each.owner))
    moves = [each.seq for each in log if each.kind == "cell.role-transition"]
    after = next(seq for seq in moves if seq > decided)
    before = max(seq for seq in moves if seq < after)
    expected = [1501, decided, after, before, before - 1, 1, 1, log[-1].seq]
    assert [int(each["address"].removeprefix("#seq=")) for each in answers] == expected
    assert all(f"sequence {seq}," in each["panel"] for seq, each in zip(expected, answers, strict=True))


@needs_node
@pytest.mark.parametrize(
    ("entity", "with_it"),
    [("cell-2", "-"), ("e-000012.03", "v-000012.03-"), ("b-000003", "m-000003."), ("g-000005", "[ev]-000005.")],
)
def test_search_finds_an_entity_and_arrows_stay_in_it(
    browse: Browse, log: list[Event], entity: str, with_it: str
) -> None:
    mine = [
        event.seq
        for event in log
        if event.entity == entity
        or re.match(with_it, event.entity)
        or entity in (getattr(event.data, "cell", ""), getattr(event.data, "target", ""))
    ]
    answers = browse(["search", entity], ["key", "ArrowRight"], ["key", "ArrowRight"], ["key", "Escape"], ["key", "ArrowRight"])
    found = [int(each["address"].removeprefix("#seq=")) for each in answers]
    assert found == [*mine[:3], mine[2], mine[2] + 1]
    assert f"{entity}: {len(mine)} events" in answers[0]["panel"]
    assert f"{entity}: {len(mine)} events" not in answers[3]["panel"]


@needs_node
def test_an_executions_slots_are_where_it_was_served(browse: Browse, log: list[Event], document: Document) -> None:
    moved = next(event.entity for event in log if event.kind == "route.moved")
    kinds = ("execution.placed", "route.moved", "execution.finished")
    mine = [event for event in log if event.entity == moved and event.kind in kinds]
    times = [(event.time_us - document.start_us) // 1000 for event in mine]
    cells = [event.data.target if event.kind == "route.moved" else event.data.cell for event in mine[:-1]]
    [answer] = browse(["ask", f"JSON.stringify(timeline.model.slotsOf(timeline.model.eventsOf('{moved}')))"])
    slots = json.loads(answer["said"])
    assert [document.cells[each["cell"]].name for each in slots] == cells
    assert [(each["from"], each["to"]) for each in slots] == list(itertools.pairwise(times))


@needs_node
def test_sequences_are_reached_by_search_address_and_links(browse: Browse, log: list[Event]) -> None:
    event = next(each for each in log if each.seq > 900 and each.causation not in (0, each.seq - 1))
    answers = browse(["search", str(event.seq)], ["follow", f"#{event.causation}"], ["search", "999999999"], ["search", "nonsense"])
    assert [each["address"] for each in answers[:3]] == [f"#seq={event.seq}", f"#seq={event.causation}", f"#seq={log[-1].seq}"]
    assert f"sequence {event.causation}," in answers[1]["panel"]
    assert f"sequence {log[-1].seq}," in answers[3]["panel"]


@needs_node
def test_of_a_long_log_the_page_says_what_it_does_not_list(browse: Browse, log: list[Event]) -> None:
    few = fold(log, limit=600)
    listed = set(few.events.seq)
    event = next(each for each in log if each.seq in listed and each.causation and each.causation not in listed)
    shown, beyond = browse(["search", str(event.seq)], ["search", str(event.causation)], page=html.page(few))
    assert f"because of #{event.causation} (in the log)" in shown["panel"]
    assert f"sequence {max(seq for seq in listed if seq < event.causation)}," in beyond["panel"]


@needs_node
def test_reasons_stand_beside_a_decision_with_both_sides(browse: Browse, log: list[Event]) -> None:
    moves = [each for each in log if each.kind == "cell.role-transition" and each.data.phase == "decided" and each.data.target == "train"]
    held = next(each for each in log if each.kind == "cell.held")
    move = moves[0]
    answers = browse(["search", str(move.seq)], ["search", str(held.seq)])
    for check in move.data.reason:
        sides = f"{check.rule}{check.left:g} {check.op.replace('<=', '≤').replace('>=', '≥')} {check.right:g}"
        assert f"\u2713{sides}" in answers[0]["panel"]
    assert f"what keeps {held.entity} from training" in answers[1]["panel"]
    assert "\u2717" in answers[1]["panel"]


@needs_node
def test_pointing_lists_the_events_behind(browse: Browse, log: list[Event], document: Document) -> None:
    train = document.values("micro_step", 0)
    t, _, value = next(each for each in train if each[2] >= 0)
    x = 104 + (t + 1) / document.end * (1200 - 104 - 16)
    answers = browse(["hover", x, 60], ["click", x, 60], ["click", x, 500], ["hover", x, 780])
    name = document.names[value]
    assert "cell-0 at " in answers[0]["tip"] and ROLES[2] in answers[0]["tip"]
    behind = answers[1]["panel"].partition("behind cell-0: training")[2]
    assert f"micro-step.claimed {name}" in behind and f"micro-step.enqueued {name}" in behind
    assert "cell.role-transition cell-0" in behind
    assert "behind waterlevel and capacity" in answers[2]["panel"]


@needs_node
@pytest.mark.parametrize(
    ("series", "kinds"),
    [("step", ["batch.opened", "batch.join-closed"]), ("published", ["burst.opened", "weights.exposed"])],
)
def test_pointing_at_a_mark_lists_what_led_to_it(browse: Browse, document: Document, series: str, kinds: list[str]) -> None:
    t, seq, _ = document.values(series)[-1 if series == "published" else 0]
    x = 104 + t / document.end * (1200 - 104 - 16)
    [answer] = browse(["click", x, 40])
    assert answer["address"] == f"#seq={seq}"
    behind = answer["panel"].partition("behind ")[2]
    assert all(kind in behind for kind in kinds), behind


@needs_node
def test_times_are_written_as_in_the_picture(browse: Browse) -> None:
    spans = [50_000, 200_000, 4_500_000, 57_600_000, 270_000_000, 9 * 86_400_000]
    answers = browse(*[["ask", f"JSON.stringify(ticks(0, {each}, 12).map((tick) => tick[1]))"] for each in spans])
    assert [json.loads(each["said"]) for each in answers] == [[text for _, text in ticks(0, each, 12)] for each in spans]
    seconds = [0.25, 59, 200, 4000, 359_000, 400_000]
    answers = browse(*[["ask", f"duration({1000 * each})"] for each in seconds])
    assert [each["said"] for each in answers] == [duration(each) for each in seconds]


@needs_node
def test_it_draws_rows_levels_and_marks_and_zooms(browse: Browse, document: Document) -> None:
    answers = browse(["press", "whole"], ["wheel", 600, -800], ["press", "whole"], ["press", "ground"], ["key", "+"])
    whole, near, again, dark, _ = answers
    for cell in ("cell-0 (core)", "cell-1", "cell-2", "cell-3"):
        assert cell in whole["drawn"]["texts"]
    assert {"executions", "groups", "1", "0"} <= set(whole["drawn"]["texts"])
    assert whole["drawn"]["fills"] > 100 and whole["drawn"]["strokes"] > 10
    assert near["drawn"]["texts"] != whole["drawn"]["texts"] == again["drawn"]["texts"]
    assert (again["ground"], dark["ground"]) == ("light", "dark")


@needs_node
def test_parts_of_a_live_run_are_appended(browse: Browse, log: list[Event], document: Document) -> None:
    tracks = Tracks(limit=None)
    parts = []
    for index, event in enumerate(log):
        tracks.see(event)
        if index in (700, 2000) or event is log[-1]:
            parts.append(msgspec.json.encode(tracks.take()).decode())
    made = f"const m = new Model({parts[0]}); m.append({parts[1]}); m.append({parts[2]});"
    asked = "JSON.stringify([m.at(1900), m.w, m.find('cell-1').rows])"
    answers = browse(["ask", f"{made} {asked}"], ["ask", asked.replace("m.", "timeline.model.")])
    assert answers[0]["said"] == answers[1]["said"]


@needs_node
def test_a_page_that_is_fed_goes_on_at_the_end(browse: Browse, log: list[Event]) -> None:
    tracks = Tracks("live", limit=None)
    for event in log[:900]:
        tracks.see(event)
    begin = tracks.take()
    for event in log[900:]:
        tracks.see(event)
    rest = msgspec.json.encode(tracks.take()).decode()
    answers = browse(["key", "End"], ["ask", f"timeline.append({rest})"], ["key", "ArrowLeft"], page=html.page(begin))
    assert answers[0]["address"] == "#seq=900"
    assert f"sequence {log[-1].seq}," in answers[1]["panel"]
    assert answers[2]["address"] == f"#seq={log[-1].seq - 1}"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium, to open the page in a browser")
def test_a_browser_opens_it(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page)
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        ["chromium", *quiet, "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom", f"{file.as_uri()}#seq=1500"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "<h2>sequence 1500, " in shown.stdout
    assert "<h1 id=\"title\">small &lt;/script&gt; &amp; &lt;quick&gt;</h1>" in shown.stdout
    assert "CONSOLE" not in shown.stderr
