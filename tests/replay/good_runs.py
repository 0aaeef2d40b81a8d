"""Runs in which nothing goes against a law: several shapes, each by its seed, written down once."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from replay.invariants import Evidence
from schemas.envelope import Event
from tests.replay.mesh import Mesh
from tests.replay.mutations import Log

ENDS: Any = ("completed", "completed", "failed", "harness_timeout", "overall_timeout", "total_failure")
SHAPES: list[dict[str, Any]] = [
    {},
    {"lose": 0.1, "cells__trainable": 1},
    {"fail": 0.3, "reasons": ENDS},
    {"restart": 0.3, "cells__capacity": 9},
    {"reasons": ENDS[3:], "fail": 0.3, "scheduler__phi": 1.0},
    {"cells__capacity": 14, "lose": 0.05, "restart": 0.1, "reasons": ENDS},
    {"scheduler__mu": 1, "scheduler__B": 3, "scheduler__phi": 1.0, "cells__capacity": 9},
    {"scheduler__mu": 3, "cells__capacity": 12, "lose": 0.1, "steps": 6},
    {"scheduler__phi": 0.0, "cells__capacity": 14, "reasons": (*ENDS[3:], "overall_timeout")},
    {"scheduler__oversample": 2, "lose": 0.1, "fail": 0.1},
    {"scheduler__oversample": 1, "reasons": ENDS, "cells__capacity": 9, "restart": 0.1},
]
OVERSAMPLED = 9
"""Shape in which more than N are dispatched."""


@cache
def run(shape: int, seed: int) -> tuple[tuple[Event, ...], Evidence]:
    mesh = Mesh(seed=seed, **SHAPES[shape])
    log = tuple(mesh.run())
    rows = {"groups": [(group, 1) for group in sorted({event.entity for event in log if event.kind == "group.ready"})]}
    return log, msgspec.structs.replace(mesh.evidence, tables=lambda: rows, rebuilt=lambda: rows)


def good() -> Log:
    return list(run(0, 0)[0])
