"""What an execution does that the recording holds, holds in part, or doesn't hold."""

from __future__ import annotations

import random

from replay.whatif.lives import Lives
from replay.whatif.recording import Recording
from tests.replay.whatif.simulated import recorded


def lives(events: int | None = None, *overrides: str) -> tuple[Recording, Lives]:
    log, _ = recorded(*overrides)
    recording = Recording(log[:events])
    return recording, Lives(recording)


def test_a_recorded_execution_does_the_same_again() -> None:
    recording, found = lives()
    whole = [each for each in recording.lives.values() if each.whole]
    assert len(whole) > 150
    for life in whole:
        lived = found.of(life.execution, life.attempt)
        assert (lived.how, lived.ran_us, lived.life) == ("recorded", life.ran_us, life)


def test_one_that_was_cut_off_goes_on_beyond_what_was_seen() -> None:
    recording, found = lives(1203)
    cut = [each for each in recording.lives.values() if each.start_us >= 0 and not each.whole]
    assert len(cut) > 10
    longest = max(each.ran_us for each in recording.lives.values() if each.whole)
    for life in cut:
        lived = found.of(life.execution, life.attempt)
        assert lived.how == "prolonged"
        assert life.ran_us < lived.ran_us <= max(longest, life.ran_us + 1)


def test_given_up_executions_are_prolonged_too() -> None:
    recording, found = lives(None, "run.scheduler.oversample=2")
    cut = [each for each in recording.lives.values() if each.start_us >= 0 and each.finished is None]
    assert len(cut) > 10
    assert all(found.of(each.execution, 0).ran_us > each.ran_us for each in cut)


def test_a_group_that_was_never_seen_lives_as_one_that_was() -> None:
    _, found = lives()
    known = {tuple(found.of(f"e-{group:06d}.{member:02d}", 0).ran_us for member in range(4)) for group in range(40)}
    taken = [found.of(f"e-000777.{member:02d}", 0) for member in range(4)]
    assert {each.how for each in taken} == {"drawn"}
    assert tuple(each.ran_us for each in taken) in known
    assert len({each.life.execution.partition(".")[0] for each in taken}) == 1


def test_draws_depend_on_run_and_id_only() -> None:
    _, forwards = lives(1203)
    _, backwards = lives(1203)
    names = [f"e-{group:06d}.{member:02d}" for group in range(10, 60) for member in range(6)]
    shuffled = random.Random(0).sample(names, len(names))
    assert {name: backwards.of(name, 0) for name in shuffled} == {name: forwards.of(name, 0) for name in names}
