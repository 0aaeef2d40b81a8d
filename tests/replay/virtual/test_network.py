"""Requests between lives: answered, refused, cut, slow, repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from replay.virtual.callbacks import LIFE
from replay.virtual.life import Life
from replay.virtual.loop import VirtualLoop
from replay.virtual.network import Cut, Fate, Network
from services.mesh.http import Unreachable


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with VirtualLoop() as loop:
        yield loop


@pytest.fixture
def network(loop: VirtualLoop) -> Network:
    return Network(loop, latency=lambda: 0.1)


class Server:
    """Answers with what it was asked, after `seconds`."""

    def __init__(self, network: Network, *, seconds: float = 1.0, port: int = 0) -> None:
        self.life = Life(network.loop, "server")
        self.seen: list[str] = []
        self.left: list[str] = []
        self.url = ""
        self._network, self._seconds, self._port = network, seconds, port
        self.life.begin(self._serve())

    async def _serve(self) -> None:
        handlers = {"/echo": self._echo, "/fail": self._fail}
        self.url = self._network.listen("server", handlers, port=self._port)
        await asyncio.Event().wait()

    async def _echo(self, what: str) -> str:
        assert LIFE.get() is self.life
        self.seen.append(what)
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.left.append(what)
            raise
        return what

    async def _fail(self) -> None:
        raise ValueError("no")


def asking(loop: VirtualLoop, scenario: Coroutine[Any, Any, None]) -> None:
    """Runs a scenario as a life of its own."""

    async def main() -> None:
        life = Life(loop, "client")
        life.begin(scenario)
        await life.ended

    loop.run_until_complete(main())


def test_a_request_is_answered_by_the_other_life(loop: VirtualLoop, network: Network) -> None:
    server = Server(network)

    async def client() -> None:
        await asyncio.sleep(0)
        assert await network.ask(server.url, "/echo", "hello") == "hello"
        assert loop.time() == pytest.approx(1.2)
        with pytest.raises(ValueError, match="no"):
            await network.ask(server.url, "/fail")

    asking(loop, client())


def test_nobody_listens(loop: VirtualLoop, network: Network) -> None:
    server = Server(network, port=7)

    async def client() -> None:
        await asyncio.sleep(0)
        with pytest.raises(Unreachable):
            await network.ask("http://nobody.sim:1", "/echo", "hello")
        with pytest.raises(Unreachable):
            await network.ask(server.url, "/nothing")
        server.life.kill()
        with pytest.raises(Unreachable):
            await network.ask(server.url, "/echo", "hello")
        again = Server(network, port=7)
        await asyncio.sleep(0)
        assert again.url == server.url
        assert await network.ask(server.url, "/echo", "hello") == "hello"

    asking(loop, client())


def test_a_port_is_taken_once(loop: VirtualLoop, network: Network) -> None:
    Server(network, port=7)

    async def client() -> None:
        await asyncio.sleep(0)
        second = Server(network, port=7)
        with pytest.raises(OSError, match="in use"):
            await second.life.ended

    asking(loop, client())


def test_a_listener_that_dies_cuts_what_it_worked_on(loop: VirtualLoop, network: Network) -> None:
    server = Server(network)

    async def client() -> None:
        await asyncio.sleep(0)
        request = asyncio.ensure_future(network.ask(server.url, "/echo", "hello"))
        await asyncio.sleep(0.5)
        server.life.kill()
        with pytest.raises(Cut):
            await request
        assert (server.seen, server.left) == (["hello"], [])

    asking(loop, client())


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_who_leaves_cancels_the_handler(loop: VirtualLoop, network: Network, how: str) -> None:
    server = Server(network)

    async def main() -> None:
        await asyncio.sleep(0)
        life = Life(loop, "asker")

        async def ask() -> None:
            await network.ask(server.url, "/echo", "hello")

        async def impatient() -> None:
            async with asyncio.timeout(0.5):
                await ask()

        life.begin(ask() if how == "killed" else impatient())
        await asyncio.sleep(0.5)
        life.kill()
        await asyncio.sleep(0.05)
        assert not server.left
        await asyncio.sleep(0.1)
        assert server.left == ["hello"]

    asking(loop, main())


@pytest.mark.parametrize(
    ("fate", "seen", "seconds"),
    [
        (Fate(slow_s=5.0), 1, 6.2),
        (Fate(late_s=5.0), 1, 6.2),
        (Fate(twice=True), 2, 1.2),
        (Fate(cut=True), 1, 1.2),
    ],
)
def test_fates(loop: VirtualLoop, network: Network, fate: Fate, seen: int, seconds: float) -> None:
    server = Server(network)
    network.fate = lambda url, path: fate

    async def client() -> None:
        await asyncio.sleep(0)
        request = network.ask(server.url, "/echo", "hello")
        if fate.cut:
            with pytest.raises(Cut):
                await request
        else:
            assert await request == "hello"
        assert loop.time() == pytest.approx(seconds)
        await asyncio.sleep(10)
        assert server.seen == ["hello"] * seen

    asking(loop, client())
