"""Who of the cells' processes still answers: probes of `/healthz`, and `cell.lost` for one that doesn't for too long.

    answers <--> silent --lost_s without a break--> cell.lost, once for each process

Of a cell's two processes only the one that the others wait for is probed, as LOG says it:

    rollout until it released the engine's memory --> trainer until it released training memory --> rollout ...

When the run is over nobody is waited for: who starts then does nothing, and would not hear that it is lost.

Silence in LOG proves nothing, a micro-step may take long; a process that is busy still answers. Where a service keeps
its addresses after a stop, the time runs from when the watch began.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from schemas import events as e
from schemas.envelope import Event
from schemas.ids import cell_index
from services.mesh.service import Context

Service = Literal["rollout", "trainer"]
_TELLS = (e.ServiceJoined, e.CellJoined, e.CellLost, e.CellRoleTransition, e.RunFinished)
"""What changes who is waited for."""
PROBE_S = 5.0
"""Longest wait for one answer."""
LOOKS = 10
"""How often is looked within the silence that is allowed."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a cell, as it announced itself."""

    cell: str
    url: str
    process: int
    """Sequence of its `service.joined`."""


class Tenancy(msgspec.Struct, kw_only=True):
    """Which process of each cell is waited for. Folded from LOG; pure."""

    service: Service
    """Whose processes are looked at."""
    tenants: dict[str, Tenant] = {}
    """Cell to the newest process of the service."""
    holders: dict[str, Service | Literal[""]] = {}
    """Cell to the service that has it; empty while it is out."""
    epochs: dict[str, int] = {}
    lost: set[int] = set()
    """Processes that were said to be lost."""
    over: bool = False
    """The run is."""

    def fold(self, event: Event) -> None:
        data, cell = event.data, event.entity
        if isinstance(data, e.ServiceJoined) and event.owner == self.service:
            cell = cell.removeprefix(f"{self.service}-")
            self.tenants[cell] = Tenant(cell=cell, url=data.url, process=event.seq)
        elif isinstance(data, e.CellJoined):
            self.holders.setdefault(cell, "rollout")
        elif isinstance(data, e.CellLost) and data.service == self.service:
            self.lost.add(data.process)
        elif isinstance(data, e.RunFinished):
            self.over = True
        elif isinstance(data, e.CellRoleTransition):
            if data.phase == "decided":
                self.epochs[cell] = data.epoch
                self.holders[cell] = "trainer" if data.target == "rollout" else "rollout"
            elif data.epoch != self.epochs.get(cell):
                return
            elif data.phase == "released":
                self.holders[cell] = "trainer" if event.owner == "rollout" else "rollout"
            elif data.phase == "failed":
                self.holders[cell] = ""

    @property
    def awaited(self) -> list[Tenant]:
        """Processes that are waited for and not said to be lost, by cell."""
        return [
            self.tenants[cell]
            for cell in sorted(self.holders, key=cell_index)
            if not self.over
            and self.holders[cell] == self.service
            and cell in self.tenants
            and self.tenants[cell].process not in self.lost
        ]


class Watch:
    """Fed LOG with `fold`; `run` probes for as long as it isn't cancelled."""

    def __init__(self, context: Context, *, service: Service, lost_s: float) -> None:
        self._context, self._lost_s = context, lost_s
        self.tenancy = Tenancy(service=service)
        self._known: list[Tenant] | None = None
        """Who is awaited; None after a change."""
        self._silent: dict[int, float] = {}
        """Process to the loop's time of its first probe without an answer since the last with one."""

    def __repr__(self) -> str:
        return f"<Watch {self.tenancy.service} [{len(self.tenancy.awaited)} awaited, {len(self._silent)} silent]>"

    def fold(self, event: Event) -> None:
        if isinstance(event.data, _TELLS):
            self.tenancy.fold(event)
            self._known = None

    async def run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._lost_s / LOOKS)

    async def _look(self) -> None:
        awaited = {f"{self.tenancy.service}-{each.cell}": each for each in self._awaited()}
        if not awaited:
            self._silent = {}
            return
        asked = asyncio.get_running_loop().time()
        urls = {instance: each.url for instance, each in awaited.items()}
        answering = await self._context.health.answering(urls, timeout_s=min(PROBE_S, self._lost_s / 2))
        now = asyncio.get_running_loop().time()
        silent = [each for instance, each in awaited.items() if instance not in answering]
        self._silent = {each.process: self._silent.get(each.process, asked) for each in silent}
        for each in silent:
            if now - self._silent[each.process] >= self._lost_s and each in self.tenancy.awaited:
                await self._say_lost(each)

    def _awaited(self) -> list[Tenant]:
        if self._known is None:
            self._known = [each for each in self.tenancy.awaited if each.cell != self._context.cell]
        return self._known

    async def _say_lost(self, tenant: Tenant) -> None:
        context, service = self._context, self.tenancy.service
        self.tenancy.lost.add(tenant.process)
        self._known = None
        context.log.warning("a cell is lost", cell=tenant.cell, lost=service, url=tenant.url)
        await context.say(
            "cell.lost",
            tenant.cell,
            e.CellLost(
                service=service,
                process=tenant.process,
                reason=f"its {service} process did not answer for {self._lost_s:g} s",
            ),
            id=f"{context.run}.{tenant.cell}.lost.{service}.{tenant.process}",
            causation=tenant.process,
        )
