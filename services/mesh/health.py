"""Health, readiness and metrics of a service, on one small HTTP server that the service may add routes to.

`/healthz` answers while the process lives, `/readyz` when it has caught up (503 with the reason before), `/metrics` in
Prometheus text. It listens on the host that its URL names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily

from schemas.errors import EnvironmentMissing
from services.mesh.host import LOOPBACK

Handler = Callable[[Mapping[str, str], bytes], Awaitable[tuple[int, bytes]]]
"""Headers and body of a POST to status and JSON: what a service answers, whatever carries the request. It is cancelled
when the one who asks goes away."""
Streamed = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Counts(Protocol):
    def inc(self, amount: float = 1) -> None: ...


class _Shows(Protocol):
    def set(self, value: float) -> None: ...


class HealthFace(Protocol):
    """What a service sees of it; `Health` here, something without sockets in a simulation."""

    ready: Callable[[], str]
    url: str

    @property
    def app(self) -> web.Application: ...

    @property
    def events(self) -> _Counts: ...

    @property
    def read_to(self) -> _Shows: ...

    def post(self, path: str, handler: Handler, *, streamed: Streamed | None = None) -> None: ...

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None: ...

    async def start(self, *, port: int = 0) -> str: ...

    async def answering(self, urls: Mapping[str, str], *, timeout_s: float) -> set[str]: ...

    async def stop(self) -> None: ...


class Health:
    """`ready` is asked at every probe: an empty string means ready, else it is the reason why not."""

    def __init__(self, *, service: str, instance: str, host: str = LOOPBACK) -> None:
        self.app = web.Application(client_max_size=64 << 20)
        self.ready: Callable[[], str] = lambda: "starting"
        self.registry = CollectorRegistry()
        self.events = Counter("gyre_events", "Events read from LOG", registry=self.registry)
        self.read_to = Gauge("gyre_log_sequence", "Last LOG sequence read", registry=self.registry)
        self._host = host
        self._labels = {"service": service, "instance": instance}
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A metric that is read when it is scraped."""
        self.registry.register(_Read(name, help, read))

    def post(self, path: str, handler: Handler, *, streamed: Streamed | None = None) -> None:
        """Serve POST at `path`. The body is read whole before the handler runs. `streamed` answers in its place over
        HTTP, where an answer may also come in parts."""

        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            status, answer = await handler(request.headers, body)
            return web.Response(body=answer, status=status, content_type="application/json")

        self.app.router.add_post(path, streamed or handle)

    async def start(self, *, port: int = 0) -> str:
        """Serve on the host; returns the URL. A port in use or a host that isn't ours is EnvironmentMissing."""
        self._runner = web.AppRunner(self.app, handle_signals=False, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, port)
        starting = asyncio.ensure_future(site.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Left in the middle, asyncio would forget the socket that it has opened.
            await asyncio.wait({starting})
            raise
        except OSError as error:
            await self._runner.cleanup()
            raise EnvironmentMissing(
                f"cannot listen on {self._host}:{port}: {error.strerror or error}",
                where=self._labels["instance"],
                remedy="stop the program that holds the port, or configure another (0 takes a free one); "
                "the host must be a name of this machine",
            ) from None
        bound = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]  # aiohttp has no public way
        self.url = f"http://[{self._host}]:{bound}" if ":" in self._host else f"http://{self._host}:{bound}"
        return self.url

    async def answering(self, urls: Mapping[str, str], *, timeout_s: float) -> set[str]:
        """Which of these instances live at their URLs: whatever else answers there, or nothing in time, is no."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
            said = await asyncio.gather(*(_name_at(session, url) for url in urls.values()))
        return {instance for instance, name in zip(urls, said, strict=True) if name == instance}

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive", **self._labels})

    async def _readyz(self, request: web.Request) -> web.Response:
        reason = self.ready()
        body = {"status": reason or "ready", **self._labels}
        return web.json_response(body, status=503 if reason else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), content_type="text/plain")


async def _name_at(session: aiohttp.ClientSession, url: str) -> object:
    """What the service at the URL says that it is called; None when none answers."""
    try:
        async with session.get(f"{url}/healthz") as response:
            said = await response.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    return said.get("instance") if isinstance(said, dict) else None


class _Read:
    def __init__(self, name: str, help: str, read: Callable[[], float]) -> None:
        self._name, self._help, self._read = name, help, read

    def collect(self) -> Any:
        yield GaugeMetricFamily(self._name, self._help, value=self._read())
