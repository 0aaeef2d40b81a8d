"""Weights on their way between simulated processes: exposed until withdrawn, or until the process that exposed them ends.

It has the face of `services.trainer.weights_exchange.WeightsExchange`; what takes time returns an awaitable.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from replay.worlds.faces import Life
from replay.worlds.training import WorldCell
from replay.worlds.world import Flat, World
from schemas import events as e
from schemas.errors import TransportError
from services.mesh.weights.transport import WeightAddress

Purpose = Literal["join", "publish"]
_KEPT: dict[str, int] = {"join": 1, "publish": 2}
BYTES = 64


class WorldExchange:
    kind = "scripted"
    reason = "a simulation"

    def __init__(self, world: World, life: Life, *, move_s: float) -> None:
        self._world, self._life, self._move_s = world, life, move_s
        self._exposed: dict[str, list[str]] = {"join": [], "publish": []}

    def __repr__(self) -> str:
        return f"<WorldExchange {self._exposed}>"

    async def expose(self, cell: WorldCell, purpose: Purpose) -> WeightAddress:
        return await self.expose_flat(cell.flat_weights(), cell.version, purpose)

    async def expose_flat(self, flat: Flat, version: int, purpose: Purpose) -> WeightAddress:
        await asyncio.sleep(self._move_s)
        name = self._world.expose(flat, version, self._life)
        mine = self._exposed[purpose]
        mine.append(name)
        while len(mine) > _KEPT[purpose]:
            self._world.withdraw(mine.pop(0))
        return WeightAddress(
            kind="shared-memory", version=version, peer="world", name=name, bytes=BYTES, digest=flat.digest
        )

    async def pull(self, exposed: e.WeightsExposed, cell: WorldCell) -> None:
        """Raises TransportError where it can't be read; the cell is as before then."""
        await asyncio.sleep(self._move_s)
        flat = self._world.pulled(exposed.address["name"], exposed.version)
        if flat is None:
            raise TransportError("nobody exposes it", where=exposed.address["name"])
        cell.load_flat(flat, version=exposed.version)

    def close(self) -> None:
        for names in self._exposed.values():
            for name in names:
                self._world.withdraw(name)
            names.clear()
