"""Health and HTTP of a simulated service: handlers on the network, and a client that asks there.

Gauges are kept, not served: they say what a service was about when a run is stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiohttp import web

from replay.worlds.faces import Network
from replay.worlds.world import Served, World
from schemas.errors import EnvironmentMissing
from services.mesh.health import Handler, Streamed
from services.proxy.engine import EPOCH_HEADER


class NoApp:
    """In place of an aiohttp application: nobody asks by sockets."""

    def add_routes(self, routes: Iterable[web.AbstractRouteDef]) -> None:
        """Nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing."""


class NoMetric:
    """Takes everything. `bool` does nothing of note and needs no frame: every event read is counted."""

    inc = set = staticmethod(bool)


_APP, _METRIC = NoApp(), NoMetric()


class WorldHealth:
    """Implements `services.mesh.health.HealthFace` for the life that starts it."""

    def __init__(self, network: Network, name: str) -> None:
        self.ready: Callable[[], str] = lambda: "starting"
        self.url = ""
        self.app = _APP
        self.events = self.read_to = _METRIC
        self.gauges: dict[str, Callable[[], float]] = {}
        self._network, self._name = network, name
        self._handlers: dict[str, Handler] = {}

    def __repr__(self) -> str:
        return f"<WorldHealth {self._name} at {self.url or 'no address'} [{self.ready() or 'ready'}]>"

    def post(self, path: str, handler: Handler, *, streamed: Streamed | None = None) -> None:
        self._handlers[path] = handler

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        self.gauges[name] = read

    async def start(self, *, port: int = 0) -> str:
        try:
            self.url = self._network.listen(self._name, self._handlers, port=port)
        except OSError as error:
            raise EnvironmentMissing(f"cannot listen on port {port}: {error.strerror}", where=self._name) from None
        return self.url

    async def answering(self, urls: Mapping[str, str], *, timeout_s: float) -> set[str]:
        # Asked all the time, and a life answers unless it hangs: so no request is made of it, and no time passes.
        listens = self._network.listens
        return {name for name, url in urls.items() if url.startswith(f"http://{name}.") and listens(url)}

    async def stop(self) -> None:
        """The address is free once the life is over."""


class WorldClient:
    """Implements `services.mesh.http.Client` over the network. Calls that cells take go into the world's journal."""

    def __init__(self, world: World) -> None:
        self._network, self._world = world.network, world

    async def post(
        self, url: str, body: bytes, *, headers: Mapping[str, str] | None = None, timeout_s: float = 0.0
    ) -> tuple[int, bytes]:
        address, path = split(url)
        log = self._world.log_end()
        asking = self._network.ask(address, path, headers or {}, body)
        if not timeout_s:
            answer: tuple[int, bytes] = await asking
            if headers and EPOCH_HEADER in headers and answer[0] == 200:
                cell = address.partition("//rollout-")[2].partition(".")[0]
                self._world.served.append(Served(cell=cell, epoch=int(headers[EPOCH_HEADER]), log=log))
            return answer
        try:
            async with asyncio.timeout(timeout_s):
                answer = await asking
                return answer
        except TimeoutError:
            raise ConnectionError(f"no answer within {timeout_s:g} s") from None

    async def aclose(self) -> None:
        """Nothing is held."""


def split(url: str) -> tuple[str, str]:
    """Address and path."""
    at = url.index("/", url.index("//") + 2)
    return url[:at], url[at:]
