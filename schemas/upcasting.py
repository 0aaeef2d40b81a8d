"""Events of earlier schema versions, as this version has them.

`Kind.v` counts the versions of a kind's data. A field that may be left out needs no new version: old events get its default.
Whatever else changes takes the next version and a function here that makes the data of the one before into it; they are
applied one after the other. What a newer version wrote nobody here can read: it stays raw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schemas.ids import cell_id

Data = dict[str, Any]
"""An event's data as JSON has it."""


def _burst_ended_1(data: Data) -> Data:
    """Said whether the core stays, and before other strategies came nothing of other cells."""
    core_stays = data.pop("core_stays")
    data["stays"] = data.get("stays") or ([cell_id(0)] if core_stays else [])
    return data


UPCASTERS: dict[tuple[str, int], Callable[[Data], Data]] = {
    ("burst.ended", 1): _burst_ended_1,
}
"""Kind and version to what makes the next version of it."""


def upcast(kind: str, data: Data, *, v: int, to: int) -> Data:
    """The data of version `v` as version `to` has it."""
    for version in range(v, to):
        data = UPCASTERS[kind, version](data)
    return data
