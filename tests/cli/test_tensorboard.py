"""Curves against the log that they come from; event files against bytes that another implementation wrote."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas import events as e
from schemas.config import Config
from schemas.envelope import Event
from services.cli.event_file import EventFile, crc32c
from services.cli.launch import launch
from services.cli.places import Places
from services.cli.progress import Progress
from services.cli.scalars import CURVES, Point, Scalars
from services.cli.tensorboard_command import write_curves
from tests.cli.conftest import Remembering
from tests.cli.test_launch import Planner
from tests.replay.recorded import event, recorded

# Written by the protocol buffers library from TensorFlow's own definitions: version, session start, one scalar.
GOLDEN = bytes.fromhex(
    "1800000000000000a37f4b220900002040fc54d9411a0d627261696e2e4576656e743a322b353110"
    "0d000000000000003c37b8340900002040fc54d9413a020801a870fdd5"
    "2300000000000000b09f77430900005040fc54d94110ac022a150a130a0c747261696e2f726577617264150000003f26b2d9b8"
)


def read(path: Path) -> list[tuple[str, int, float, float]]:
    """(curve, step, value, time) of every scalar in an event file, checksums verified."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        message = data[at + 12 : at + 12 + length]
        assert unmasked(data, at + 8) == crc32c(data[at : at + 8])
        assert unmasked(data, at + 12 + length) == crc32c(message)
        at += 16 + length
        fields = dict(decode(message))
        if 5 in fields:
            point = dict(decode(dict(decode(fields[5]))[1]))
            [value], [time_s] = struct.unpack("<f", point[2]), struct.unpack("<d", fields[1])
            found.append((point[1].decode(), fields.get(2, 0), value, time_s))
    return found


def unmasked(data: bytes, at: int) -> int:
    (masked,) = struct.unpack_from("<I", data, at)
    turned = (masked - 0xA282EAD8) % 2**32
    return (turned >> 17 | turned << 15) % 2**32


def decode(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, message[at : at + size]
        at += size


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283
    with EventFile(tmp_path, began_s=1700000000.5) as file:
        file.scalar("train/reward", 0.5, step=300, time_s=1700000001.25)
    assert file.path.read_bytes() == GOLDEN
    assert read(file.path) == [("train/reward", 300, 0.5, 1700000001.25)]


def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("ours to leave alone")
    for value in (0.25, 0.5):
        with EventFile(tmp_path, began_s=1.0) as file:
            file.scalar("train/loss", value, step=1, time_s=2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.path.name, "notes.txt"]
    assert ".000001." in file.path.name
    assert read(file.path) == [("train/loss", 1, 0.5, 2.0)]


def test_points_of_a_step() -> None:
    scalars = Scalars()
    points: list[Point] = []
    log = recorded()
    for each in log:
        points += scalars.apply(each)
    steps: dict[int, Event] = {}
    for each in log:
        if each.kind == "batch.stepped":
            # Said again after a crash, it changes nothing.
            steps.setdefault(each.data.step, each)
    assert steps
    for stepped in steps.values():
        data: e.BatchStepped = stepped.data
        of_step = {point.curve: point for point in points if point.step == data.step}
        assert of_step["train/reward"].value == data.reward
        assert of_step["train/grad_norm"].value == data.grad_norm
        assert of_step["train/masked_share"].value == data.masked / data.executions
        assert of_step["train/loss"].time_s == stepped.time_us / 1e6
        assert of_step["cells/cell-0"].value == 1
        consumed = [each.data for each in log if each.kind == "group.consumed"]
        ages = [each.staleness for each in consumed if each.batch == stepped.entity]
        assert of_step["staleness/mean"].value == sum(ages) / len(ages)
        assert of_step["staleness/max"].value == max(ages)
        of_step.pop("cells/cell-1", None)
        assert {"cells/{cell}" if curve.startswith("cells/") else curve for curve in of_step} <= set(CURVES)
    assert len(points) == len({(point.curve, point.step) for point in points})


async def test_curves_of_a_run_equal_its_log(
    config: Config, places: Places, plan: Planner, go: Path, tmp_path: Path
) -> None:
    def react(progress: Progress) -> None:
        if len(progress.steps) == 2 and not told:
            told.append(1)
            go.write_text("go")

    told: list[int] = []
    with places.hold("test"):
        await launch(
            config,
            tasks=[],
            here=tmp_path,
            places=places,
            view=Remembering(react),
            plan=plan("scheduler", "worker"),
            settle_s=0.5,
        )
    run = places.newest()
    assert run is not None
    logdir = tmp_path / "curves"
    for follow in (False, True):
        count = await write_curves(places, run, logdir, follow=follow)
        # Written a second time, nothing is there twice.
        [file] = (logdir / run).iterdir()
        found = read(file)
        assert len(found) == count == len({(curve, step) for curve, step, *_ in found})
        rewards = [(step, value) for curve, step, value, _ in found if curve == "train/reward"]
        assert rewards == [(1, 0.25), (2, 0.5)]
        gaps = [value for curve, _, value, _ in found if curve == "logprob_gap/max"]
        assert gaps == pytest.approx([1e-6, 1e-6])
        waterlevels = [value for curve, _, value, _ in found if curve == "mesh/waterlevel"]
        assert waterlevels == [1, 1]


def test_what_this_version_does_not_know_makes_no_point() -> None:
    assert Scalars().apply(event(1, "moon.phase", "moon", msgspec.Raw(b"{}"))) == []
