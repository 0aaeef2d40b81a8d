"""The state along a log is the one that the decider had; places outside of the log are refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from replay.debugging.fields import FIELDS, values
from replay.debugging.moments import Walk, check_inside, point
from replay.logfile import read
from replay.replayer import Replayer
from schemas.envelope import Event
from schemas.errors import ConfigError, LogBroken
from services.scheduler.core.state import State
from services.scheduler.decider import Scheduler
from tests.replay.recorded import log_of, recorded, write


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return recorded(seed=3, lose=0.1, lose_cells=0.2, restore=0.2)


def encoded(state: State) -> bytes:
    return msgspec.json.encode(state, order="deterministic")


def test_after_the_decisions_on_an_input_the_state_is_the_one_that_a_replay_has(events: list[Event]) -> None:
    walk, seen = Walk(events), 0
    for step in Replayer(deciders=[Scheduler()]).steps(events):
        while walk.ahead is not None and (walk.ahead.seq == step.event.seq or walk.answers == step.event):
            walk.step()
        assert encoded(walk.driver.state) == encoded(step.state), step.event.seq
        seen += 1
    assert walk.ahead is None and seen > 500


def test_an_input_that_was_stored_before_the_answers_to_an_earlier_one_waits_for_them(events: list[Event]) -> None:
    index = next(
        n
        for n, each in enumerate(events[:-2])
        if each.kind == "execution.finished"
        and events[n + 1].owner == "scheduler"
        and events[n + 2].owner != "scheduler"
    )
    later = list(events)
    # The next input overtakes the decision: the stream numbers them so.
    later[index + 1] = msgspec.structs.replace(events[index + 2], seq=events[index + 1].seq)
    later[index + 2] = msgspec.structs.replace(events[index + 1], seq=events[index + 2].seq)
    order = [moment.event.id for moment in Walk(later[: index + 3])]
    assert order[-3:] == [events[index].id, events[index + 1].id, events[index + 2].id]


def test_a_place_is_a_sequence_a_time_since_the_start_or_a_date(events: list[Event]) -> None:
    assert Walk(events).to(point("77")).event.seq == 77
    last = Walk(events).to(point(str(events[-1].seq)))
    assert last.event == events[-1]
    since = (events[-1].time_us - events[0].time_us) // 2_000_000
    found = Walk(events).to(point(f"{since}s"))
    assert found.time_s <= since
    assert point("1h30m").since_us == point("+90min").since_us == point("1.5 h").since_us == 5_400_000_000
    assert (
        point("2026-01-02T00:00:00Z").time_us == point("2026-01-02").time_us == point("2026-01-02T01:00+01:00").time_us
    )


def test_the_moment_before_a_place(events: list[Event]) -> None:
    assert Walk(events).to(point("77"), before=True).event.seq == 76


@pytest.mark.parametrize("text", ["soon", "-4", "3x", "1h of time", "²", ""])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no place in a log"):
        point(text)


@pytest.mark.parametrize("text", ["0", "1000000", "1000h", "1990-01-01", "2100-01-01T00:00:00Z"])
def test_a_place_outside_of_the_log_is_refused_and_what_it_covers_is_told(
    events: list[Event], tmp_path: Path, text: str
) -> None:
    said = rf"outside of the log\n  -> it covers sequences 1 to {len(events)}"
    with pytest.raises(ConfigError) as walked:
        Walk(events).to(point(text))
    assert f"it covers sequences 1 to {len(events)}," in str(walked.value)
    write(tmp_path / "run.gyre", events)
    with pytest.raises(ConfigError, match=said):
        check_inside(read(tmp_path / "run.gyre"), point(text))


def test_a_log_that_does_not_say_when_it_ends_is_walked(events: list[Event], tmp_path: Path) -> None:
    write(tmp_path / "run.gyre", events)
    log = read(tmp_path / "run.gyre")
    log.manifest = msgspec.structs.replace(log.manifest, first_us=0, last_us=0)
    check_inside(log, point("1000h"))
    with pytest.raises(ConfigError, match="is outside of the log"):
        Walk(log).to(point("1000h"))
    assert Walk(log).to(point("1s")).time_s <= 1


def test_every_field_can_be_read_at_every_moment(events: list[Event]) -> None:
    seen: set[str] = set()
    for moment in Walk(events):
        for field in FIELDS.values():
            value = field.read(moment)
            if value is None:
                continue
            seen.add(field.name)
            kinds = {"number": (int, float), "word": str, "yes or no": bool}[field.type]
            assert isinstance(value, kinds) and isinstance(value, bool) is (field.type == "yes or no"), field.name
    assert FIELDS.keys() - seen <= {"measurement.id", "measurement.open"}


def test_the_fields_are_nested_as_their_names_are(events: list[Event]) -> None:
    walk = Walk(events)
    first = walk.step()
    assert first is not None
    assert values(first)["batch"] is None and values(first)["cells"] == []
    moment = next(each for each in walk if each.event.kind == "batch.stepped")
    found = values(moment)
    assert found["batch"]["stepped"] is True and found["w"] == found["d"] - found["f"]
    assert [each["name"] for each in found["cells"]][:2] == ["cell-0", "cell-1"]
    assert found["cells"][0]["role"] == "training"


def test_a_log_that_the_state_cannot_follow_is_refused_with_the_place(events: list[Event]) -> None:
    joined = next(each for each in events if each.kind == "cell.joined")
    with pytest.raises(LogBroken, match=r"sequence 1: the scheduler's state cannot follow cell\.joined"):
        list(Walk(log_of((joined.kind, joined.entity, joined.data))))
