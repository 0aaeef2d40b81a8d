"""Events of cells: their roles, and the weights that they hold."""

from __future__ import annotations

from typing import Any, Literal

from schemas.units import CellRole, Check, Phase, Value

# cell


class CellJoined(Value, frozen=True, kw_only=True):
    index: int
    capacity: int
    url: str
    """Adapter that the proxy calls."""
    engine: str
    version: int
    capabilities: list[str]


class CellRoleTransition(Value, frozen=True, kw_only=True):
    phase: Phase
    source: CellRole
    target: CellRole
    epoch: int
    reason: list[Check] = []
    seconds: float = 0.0
    """Since the phase before, as the one who says it measured; 0 in decisions."""
    version: int = -1
    """Policy version that the engine holds, where the phase sets one."""


class CellHeld(Value, frozen=True, kw_only=True):
    """Why the next cell doesn't join training yet. Said when the first check that fails is another one than before."""

    reason: list[Check]
    """All checks that it needs, as they stand."""


class CellWithdrawn(Value, frozen=True, kw_only=True):
    by: str


class CellReinstated(Value, frozen=True, kw_only=True):
    by: str


class CellAdded(Value, frozen=True, kw_only=True):
    by: str


class CellLost(Value, frozen=True, kw_only=True):
    """A cell's process doesn't answer any more. It counts again once another process of the service joins."""

    service: Literal["rollout", "trainer"]
    process: int
    """Sequence of the `service.joined` of the process that doesn't answer."""
    reason: str
    """In our own words."""


# weights


class WeightsExposed(Value, frozen=True, kw_only=True):
    version: int
    purpose: Literal["join", "publish"]
    address: dict[str, Any]
    """A `services.mesh.weights` address."""
    bytes: int
    rendezvous: str = ""
    """For joiners: `host:port` of the store on which the prefix groups meet."""


class WeightsPublished(Value, frozen=True, kw_only=True):
    version: int
    bytes: int
    seconds: float
    transport: str
