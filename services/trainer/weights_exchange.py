"""Weights on their way out of the core and into satellites: what this process exposes, and what it pulls.

Invariants: an exposure is said only when it can be pulled; the newest of each purpose can be pulled, and for engines
the one before, so that an engine that started its pull late still finds what it was told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from schemas import events as e
from services.mesh.weights.transport import WeightAddress, open_transport

if TYPE_CHECKING:
    from services.trainer.cell import Cell

Purpose = Literal["join", "publish"]
Flat = npt.NDArray[np.float32]
_KEPT: dict[Purpose, int] = {"join": 1, "publish": 2}


class WeightsExchange:
    """One process's end. Everything blocks and is called in the thread of the cell."""

    def __init__(self, kind: str) -> None:
        """`kind` as `services.mesh.weights.transport.open_transport` takes it, and raises."""
        self._transport = open_transport(kind)
        self._exposed: dict[Purpose, list[WeightAddress]] = {"join": [], "publish": []}

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(addresses)} to {purpose}" for purpose, addresses in self._exposed.items())
        return f"<WeightsExchange {self._transport.kind}: {counts}>"

    @property
    def kind(self) -> str:
        """How weights travel."""
        return self._transport.kind

    @property
    def reason(self) -> str:
        """Why that way."""
        return self._transport.reason

    def expose(self, cell: Cell, purpose: Purpose) -> WeightAddress:
        """Exposes a copy of the cell's weights under its version."""
        return self.expose_flat(cell.flat_weights(), cell.version, purpose)

    def expose_flat(self, flat: Flat, version: int, purpose: Purpose) -> WeightAddress:
        """Exposes a copy of these weights."""
        address = self._transport.expose(flat, version)
        mine = self._exposed[purpose]
        mine.append(address)
        while len(mine) > _KEPT[purpose]:
            self._transport.withdraw(mine.pop(0))
        return address

    def pull(self, exposed: e.WeightsExposed, cell: Cell) -> None:
        """Sets the cell's weights and version to what was exposed. Raises TransportError where it can't be read; the
        cell is as before then."""
        flat = np.empty(exposed.bytes // 4, np.float32)
        self._transport.pull(msgspec.convert(exposed.address, WeightAddress), flat)
        cell.load_flat(flat, version=exposed.version)

    def close(self) -> None:
        """Withdraws everything."""
        self._transport.close()
