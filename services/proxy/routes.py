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
    """Fed with every event of LOG in order (`apply`), which wakes those whom it concerns: every call in flight waits."""

    def __init__(self) -> None:
        self._routes: dict[str, tuple[int, str, int]] = {}
        self._urls: dict[str, str] = {}
        self._news: dict[str, asyncio.Event] = {}
        """Of the executions for which somebody waits."""

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
                self._tell(list(self._news))
                return
            case "cell.lost":
                self._urls.pop(event.entity, None)
                self._tell(list(self._news))
                return
            case _:
                return
        self._tell([event.entity])

    def of(self, execution: str) -> Route | None:
        """None while the execution isn't placed."""
        if (found := self._routes.get(execution)) is None:
            return None
        attempt, cell, epoch = found
        return Route(attempt=attempt, cell=cell, epoch=epoch, url=self._urls.get(cell, ""))

    async def wait_for_route(self, execution: str, attempt: int) -> Route:
        """The route of this attempt, once it is placed and its cell's address is known."""
        while (route := self.of(execution)) is None or route.attempt < attempt or not route.url:
            await self._next(execution)
        return route

    async def wait_for_change(self, execution: str, seen: Route, timeout_s: float) -> bool:
        """Whether the route became another than `seen` within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.of(execution) == seen:
                    await self._next(execution)
        except TimeoutError:
            return False
        return True

    async def wait_for_move(self, execution: str, seen: Route) -> Route:
        """Where the calls of this attempt go instead of `seen`. An execution that ends or starts again doesn't move."""
        while (route := self.of(execution)) is None or route.attempt != seen.attempt or route == seen:
            await self._next(execution)
        return route

    async def _next(self, execution: str) -> None:
        await self._news.setdefault(execution, asyncio.Event()).wait()

    def _tell(self, executions: list[str]) -> None:
        for execution in executions:
            if news := self._news.pop(execution, None):
                news.set()
