"""Exported logs come back as they were, and every kind of damage is named where it is."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from replay.logfile import BadLogFile, read, read_events, read_manifest, read_messages
from replay.logwriter import LogWriter, export
from schemas.errors import GyreError, LogBroken
from services.mesh.bus import Stored
from services.mesh.codec import decode
from tests.replay.recorded import recorded, stored, write

EVENTS = recorded(steps=2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.gyre"
    write(path, EVENTS)
    return path


def lines_of(path: Path) -> list[bytes]:
    data = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
    with data:
        return data.read().splitlines(keepends=True)


def rewrite(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines)))


def test_what_was_written_is_read(file: Path) -> None:
    assert list(read_messages(file)) == [stored(each) for each in EVENTS]
    assert read_events(file) == EVENTS
    manifest = read_manifest(file)
    assert (manifest.messages, manifest.first_seq, manifest.last_seq) == (len(EVENTS), 1, len(EVENTS))
    assert manifest.run == "r-test"
    assert manifest.kinds["run.started"] == 1
    assert set(manifest.kinds) == {each.kind for each in EVENTS}


def test_the_same_log_gives_the_same_file(tmp_path: Path, file: Path) -> None:
    write(tmp_path / "again.gyre", EVENTS)
    assert (tmp_path / "again.gyre").read_bytes() == file.read_bytes()


def swap(lines: list[bytes]) -> list[bytes]:
    return [*lines[:5], lines[6], lines[5], *lines[7:]]


def altered(lines: list[bytes]) -> list[bytes]:
    index = next(i for i, line in enumerate(lines) if b'"cell":"cell-' in line)
    return [*lines[:index], lines[index].replace(b'"cell":"cell-', b'"cell":"cell-9', 1), *lines[index + 1 :]]


def with_another_time(lines: list[bytes]) -> list[bytes]:
    return [*lines[:8], lines[8].replace(b'"time_us":', b'"time_us":1', 1), *lines[9:]]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda lines: lines[:-3], f"ends after sequence {len(EVENTS) - 3}"),
        (lambda lines: [*lines[:4], *lines[5:]], "line 5: sequence 4 is missing"),
        (swap, "line 6: sequence 5 is missing"),
        (lambda lines: [*lines[:5], lines[4], *lines[5:]], "line 6: sequence 5 is out of order"),
        (altered, r"execution.placed e-\d{6}.\d\d by scheduler\) was altered"),
        (with_another_time, r"line 9: sequence 8 .* was altered"),
        (lambda lines: [*lines[:3], b"{}\n", *lines[4:]], "line 4 .after sequence 2. is no message"),
        (lambda lines: lines[1:], "no manifest"),
        (lambda lines: [], "no manifest"),
    ],
)
def test_damage_is_named(file: Path, damage: Callable[[list[bytes]], list[bytes]], named: str) -> None:
    rewrite(file, damage(lines_of(file)))
    with pytest.raises(BadLogFile, match=named) as caught:
        read_events(file)
    assert caught.value.exit_code == 2


def test_a_truncated_file_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BadLogFile):
        read_events(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    with pytest.raises(BadLogFile, match="no zstd file"):
        read_events(tmp_path / "x")
    with pytest.raises(BadLogFile, match="no such file"):
        read_events(tmp_path / "absent")


def test_nothing_appears_under_the_name_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.gyre"
    with pytest.raises(LogBroken, match="sequence 3 follows 1"), LogWriter(path) as writer:
        writer.add(stored(EVENTS[0]))
        writer.add(stored(EVENTS[2]))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(GyreError, match="no event"), LogWriter(path) as writer:
        writer.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "device", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to("/dev/null")
    before = os.lstat(target)
    with pytest.raises(GyreError, match="no file") as caught:
        write(target, EVENTS)
    assert caught.value.where == str(target)
    assert os.lstat(target).st_ino == before.st_ino and [*tmp_path.iterdir()] == [target]


async def test_a_full_disk_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def messages() -> AsyncIterator[Stored]:
        for event in EVENTS:
            yield stored(event)

    def full(writer: LogWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LogWriter, "finish", full)
    with pytest.raises(GyreError, match="No space left") as caught:
        await export(messages(), tmp_path / "run.gyre")
    assert caught.value.remedy and not [*tmp_path.iterdir()]


def test_what_this_version_does_not_know_stays_raw(tmp_path: Path) -> None:
    """Between events that are known: a kind to come, and a version to come of a kind that is there."""
    messages = [stored(each) for each in EVENTS[:4]]
    strange = [
        (b'"kind":"burst.opened"', b'"kind":"burst.praised"'),
        (b'"v":1', b'"v":9'),
    ]
    for at, (was, now) in enumerate(strange, start=1):
        assert was in messages[at].data
        messages[at] = msgspec.structs.replace(messages[at], data=messages[at].data.replace(was, now))
    with LogWriter(tmp_path / "run.gyre") as writer:
        for each in messages:
            writer.add(each)
        writer.finish()
    events = read_events(tmp_path / "run.gyre")
    assert events == [decode(each) for each in messages]
    assert [isinstance(each.data, msgspec.Raw) for each in events] == [False, True, True, False]


def test_data_that_is_not_its_kinds_is_named_after_what_lies_before_it(tmp_path: Path) -> None:
    messages = [stored(each) for each in EVENTS[:4]]
    broken = messages[2].data.replace(b'"data":{', b'"data":{"reason":7,"version":"x",')
    messages[2] = msgspec.structs.replace(messages[2], data=broken)
    with LogWriter(tmp_path / "run.gyre") as writer:
        for each in messages:
            writer.add(each)
        writer.finish()
    events = iter(read(tmp_path / "run.gyre"))
    assert [next(events), next(events)] == EVENTS[:2]
    with pytest.raises(BadLogFile, match="sequence 3"):
        next(events)
