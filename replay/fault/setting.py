"""What the run of a seed is given: how it begins, and who takes part."""

from __future__ import annotations

import msgspec

from replay.worlds import scenario, wiring
from schemas.config import Config
from schemas.events import RunStarted
from schemas.ids import proxy_ids

RUN = "r-fault"
START_US = 1_767_225_600_000_000
"""When every simulated run begins: the first second of 2026."""
SECRET = b"a key that guards nothing"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    started: RunStarted

    @property
    def config(self) -> Config:
        return self.started.config

    @property
    def executions(self) -> int:
        """About how many there will be."""
        s = self.config.scheduler
        return round((self.config.steps + s.phi) * s.B * s.group_size)

    def instances(self) -> list[str]:
        """Names of the processes of the mesh."""
        cells = [f"cell-{index}" for index in range(self.config.cells.count)]
        pool = [f"rollout-pool-{index}" for index in range(self.config.cells.pool)]
        proxies = proxy_ids(self.config.proxy.count)
        return [*wiring.WORKERS, *proxies, *pool, *(f"{service}-{cell}" for cell in cells for service in ("rollout", "trainer"))]


def setting_of(seed: int) -> Setting:
    """The run that the seed draws."""
    return Setting(seed=seed, started=scenario.started(seed))
