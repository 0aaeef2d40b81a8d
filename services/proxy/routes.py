"""Where an execution's calls go: a projection of LOG. The scheduler decides routes, the proxy only follows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from schemas.envelope import Event


class Route(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int
    cell: str
    epoch: int
    url: str
    """Adapter of the cell; empty while it is not known."""


class Move:
    """A call that is at `seen` hears where to go on."""

    __slots__ = ("seen", "target")

    def __init__(self, seen: Route, target: asyncio.Future[Route]) -> None:
        self.seen, self.target = seen, target

    def look(self, route: Route | None) -> None:
        if route is not None and route.attempt == self.seen.attempt and route != self.seen and not self.target.done():
            self.target.set_result(route)


class Routes:
    """Fed with every event of LOG in order (`apply`), which wakes those whom it concerns: every call in flight waits."""

    def __init__(self) -> None:
        self._routes: dict[str, tuple[int, str, int]] = {}
        self._urls: dict[str, str] = {}
        self._joined: dict[str, int] = {}
        self._news: dict[str, asyncio.Event] = {}
        """Of the executions for which somebody waits."""
        self._moves: dict[str, dict[Move, None]] = {}
        """Of the executions with calls in flight."""

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
                self._joined[event.entity] = self.joins(event.entity) + 1
                self._tell(dict.fromkeys((*self._news, *self._moves)))
                return
            case "cell.lost":
                self._urls.pop(event.entity, None)
                self._tell(dict.fromkeys((*self._news, *self._moves)))
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
        while (route := self.ready(execution, attempt)) is None:
            await self._next(execution)
        return route

    def ready(self, execution: str, attempt: int) -> Route | None:
        """The route of this attempt; None while it isn't placed or its cell's address isn't known."""
        route = self.of(execution)
        return None if route is None or route.attempt < attempt or not route.url else route

    def joins(self, cell: str) -> int:
        """How often a cell has joined."""
        return self._joined.get(cell, 0)

    async def wait_for_change(self, execution: str, seen: Route, joins: int, timeout_s: float) -> bool:
        """Whether the route became another than `seen` within the time, or its cell, which had joined so often, joined
        again."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.of(execution) == seen and self.joins(seen.cell) == joins:
                    await self._next(execution)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def moves(self, execution: str, seen: Route) -> Iterator[asyncio.Future[Route]]:
        """Done with where the calls of this attempt go instead of `seen`. An execution that ends or starts again doesn't
        move."""
        move = Move(seen, asyncio.get_running_loop().create_future())
        waiting = self._moves.setdefault(execution, {})
        waiting[move] = None
        move.look(self.of(execution))
        try:
            yield move.target
        finally:
            del waiting[move]
            if not waiting:
                self._moves.pop(execution, None)
            move.target.cancel()

    async def _next(self, execution: str) -> None:
        await self._news.setdefault(execution, asyncio.Event()).wait()

    def _tell(self, executions: Iterable[str]) -> None:
        for execution in executions:
            if news := self._news.pop(execution, None):
                news.set()
            for move in self._moves.get(execution, ()):
                move.look(self.of(execution))
