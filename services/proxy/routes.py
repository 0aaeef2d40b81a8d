"""Where an execution's calls go: a projection of LOG. The scheduler decides routes, the proxy only follows."""

from __future__ import annotations

import asyncio

import msgspec

from schemas.envelope import Event


class Route(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int
    cell: str
    epoch: int
    url: str
    """Adapter of the cell; empty while it is not known."""


class Routes:
    """Fed with every event of LOG in order (`apply`); `changed` wakes those who wait for another route."""

    def __init__(self) -> None:
        self._routes: dict[str, tuple[int, str, int]] = {}
        self._urls: dict[str, str] = {}
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Routes [{len(self._routes)} executions, {len(self._urls)} cells]>"

    def apply(self, event: Event) -> None:
        match event.kind:
            case "execution.placed":
                self._routes[event.entity] = (event.data.attempt, event.data.cell, event.data.epoch)
            case "route.moved" if event.entity in self._routes:
                attempt, _, _ = self._routes[event.entity]
                self._routes[event.entity] = (attempt, event.data.target, event.data.epoch)
            case "execution.finished":
                self._routes.pop(event.entity, None)
            case "cell.joined":
                self._urls[event.entity] = event.data.url
            case "cell.lost":
                self._urls.pop(event.entity, None)
            case _:
                return
        news, self._news = self._news, asyncio.Event()
        news.set()

    def of(self, execution: str) -> Route | None:
        """None while the execution isn't placed."""
        if (found := self._routes.get(execution)) is None:
            return None
        attempt, cell, epoch = found
        return Route(attempt=attempt, cell=cell, epoch=epoch, url=self._urls.get(cell, ""))

    async def wait_for_route(self, execution: str, attempt: int) -> Route:
        """The route of this attempt, once it is placed and its cell's address is known."""
        while (route := self.of(execution)) is None or route.attempt < attempt or not route.url:
            await self._news.wait()
        return route

    async def wait_for_change(self, execution: str, seen: Route, timeout_s: float) -> bool:
        """Whether the route became another than `seen` within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.of(execution) == seen:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True
