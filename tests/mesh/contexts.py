"""Contexts of services that a test runs in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schemas.config_file import from_tree
from schemas.events import RunStarted
from services.mesh.bus import Bus
from services.mesh.clock import Clock, SystemClock
from services.mesh.service import Context

STARTED = RunStarted(
    seed=0,
    config=from_tree({"name": "t", "steps": 3, "harness": {"command": ["true"]}}, where="test"),
    tasks=[],
    code="test",
)
"""The beginning of a run of which nothing more is asked."""


def context_of(
    service: str,
    bus: Bus,
    folder: Path,
    *,
    started: RunStarted = STARTED,
    clock: Clock | None = None,
    secret: bytes = b"s",
    instance: str = "",
    cell: str = "",
    **others: Any,
) -> Context:
    """Of a service in the run of `bus`; all its folders are `folder`."""
    return Context(
        bus=bus,
        clock=clock or SystemClock(),
        started=started,
        run=bus.run,
        service=service,
        instance=instance or (f"{service}-{cell}" if cell else service),
        folder=folder,
        cache=folder,
        here=folder,
        secret=secret,
        cell=cell,
        **others,
    )
