"""Events of earlier schema versions and what a later version cannot read; the flags of a run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas import events as e
from schemas.errors import LogBroken
from schemas.events import BurstEnded
from schemas.flags import FLAGS, NEWEST
from schemas.kinds import KINDS
from schemas.upcasting import UPCASTERS
from services.mesh.bus import Stored
from services.mesh.codec import decode


def stored(kind: str, v: int, data: dict[str, Any]) -> Stored:
    envelope = {"id": "i", "run": "r", "kind": kind, "entity": "u-000001", "owner": "scheduler", "v": v, "data": data}
    return Stored(seq=7, subject="s", time_us=1, headers={}, data=msgspec.json.encode(envelope))


@pytest.mark.parametrize(
    ("said", "stays"),
    [
        ({"core_stays": True}, ["cell-0"]),
        ({"core_stays": False}, []),
        ({"core_stays": True, "stays": ["cell-0", "cell-1"]}, ["cell-0", "cell-1"]),
    ],
)
def test_an_earlier_version_is_made_into_this_one(said: dict[str, Any], stays: list[str]) -> None:
    event = decode(stored("burst.ended", 1, {"version": 3, "reason": [], **said}))
    assert event.data == BurstEnded(version=3, reason=[], stays=stays)
    assert event.data.core_stays == bool(stays)


def test_a_later_version_stays_raw() -> None:
    event = decode(stored("burst.ended", KINDS["burst.ended"].v + 1, {"who": "knows"}))
    assert isinstance(event.data, msgspec.Raw)


def test_what_no_version_can_have_written_is_refused() -> None:
    with pytest.raises(LogBroken, match=r"burst\.ended"):
        decode(stored("burst.ended", 1, {"version": 3, "reason": []}))


def test_every_earlier_version_has_its_way_to_this_one() -> None:
    wanted = {(kind.name, v) for kind in KINDS.values() for v in range(1, kind.v)}
    assert UPCASTERS.keys() == wanted


def test_flags_are_recorded_by_those_who_know_them() -> None:
    assert sorted(FLAGS) == NEWEST
    assert e.RunStarted.__struct_defaults__[-1:] != (NEWEST,), "an old log has none"
