"""Runs whose services others keep: opened once, taken by services that wait, left for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from schemas.config import Config
from schemas.events import RunFinished
from services.cli import background, logs
from services.cli.places import Places
from services.cli.service_command import service_command
from services.cli.standing import is_over, newest, open_or_find, until_replaced, wait_for_run
from services.mesh.clock import SystemClock
from services.mesh.nats_bus import connect
from services.mesh.publisher import Publisher
from services.mesh.server import NatsServer
from services.mesh.service import Context, announce, open_context, run_service
from tests.cli.command import gyre
from tests.cli.conftest import ROOT, TOML, write_policy, write_tasks


async def end(run: str, url: str) -> None:
    bus = await connect(url, run, name="test")
    try:
        publisher = Publisher(bus=bus, clock=SystemClock(), run=run, owner="operator", instance="operator")
        await publisher.say("run.finished", run, RunFinished(steps=0, reason="stopped"), id=f"{run}.stopped")
    finally:
        await bus.close()


async def test_one_run_at_a_time(config: Config, places: Places, nats_server: NatsServer) -> None:
    url = nats_server.url
    waiting = asyncio.create_task(wait_for_run(places, url))
    first, opened = await open_or_find(config, tasks=[], places=places, url=url)
    assert opened
    assert newest(places) == places.newest() == first
    assert len((places.run(first) / "secret").read_bytes()) == 32
    async with asyncio.timeout(30):
        assert await waiting == first
    assert await open_or_find(config, tasks=[], places=places, url=url) == (first, False)

    await end(first, url)
    assert await is_over(first, url)
    # Nobody takes a run that is over.
    waiting = asyncio.create_task(wait_for_run(places, url))
    second, opened = await open_or_find(config, tasks=[], places=places, url=url)
    assert opened
    assert second != first
    async with asyncio.timeout(30):
        assert await waiting == second
    # The commands that read find the bus in the run's folder.
    kinds = [event.kind async for _, event in logs.read_events(places, first)]
    assert kinds == ["run.started", "run.finished"]


async def test_a_run_with_a_supervisor_is_not_ours(config: Config, places: Places, nats_server: NatsServer) -> None:
    run, _ = await open_or_find(config, tasks=[], places=places, url=nats_server.url)
    mesh = places.run(run) / "mesh.json"
    mesh.write_bytes(mesh.read_bytes().replace(b'"supervisor": 0', f'"supervisor": {os.getpid()}'.encode()))
    assert newest(places) is None


async def test_a_service_leaves_for_the_next_run(
    config: Config, places: Places, nats_server: NatsServer, tmp_path: Path
) -> None:
    url = nats_server.url
    run, _ = await open_or_find(config, tasks=[], places=places, url=url)
    serving = asyncio.Event()

    async def serve(context: Context) -> None:
        await announce(context)
        serving.set()
        await asyncio.Event().wait()

    context = await open_context(
        url=url, run=run, service="packer", folder=places.run(run), cache=places.cache, here=tmp_path
    )
    service = asyncio.create_task(run_service(until_replaced(serve, places), context))
    async with asyncio.timeout(30):
        await serving.wait()
        status = await background.status(places, run)
        assert (status.up, status.supervisor, status.nats) == (True, 0, url)
        assert [(each.name, each.health) for each in status.services] == [("packer", "starting")]
        await end(run, url)
        assert not service.done()
        await open_or_find(config, tasks=[], places=places, url=url)
        assert await service == 0
    said = [event.kind async for _, event in logs.read_events(places, run)]
    assert said == ["run.started", "service.joined", "run.finished", "service.left"]


async def test_a_failure_is_not_hidden(config: Config, places: Places, nats_server: NatsServer, tmp_path: Path) -> None:
    run, _ = await open_or_find(config, tasks=[], places=places, url=nats_server.url)

    async def serve(context: Context) -> None:
        raise ValueError("broken")

    context = await open_context(
        url=nats_server.url, run=run, service="packer", folder=places.run(run), cache=places.cache, here=tmp_path
    )
    assert await run_service(until_replaced(serve, places), context) == 1


def test_the_command_opens_and_a_service_takes_it(tmp_path: Path, nats_server: NatsServer) -> None:
    file, state = tmp_path / "tiny.toml", tmp_path / "state"
    file.write_text(TOML)
    write_tasks(state / "cache" / "tasks")
    write_policy(state / "cache" / "policy")
    environment = {**os.environ, "GYRE_STATE": str(state), "GYRE_NATS": nats_server.url, "GYRE_HOST": "localhost"}

    def began(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.cli", *words]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)

    with began("service", "scheduler", "--here", str(tmp_path)) as service:
        try:
            with began("open", str(file), "--json") as opening:
                opened = msgspec.json.decode(opening.communicate(timeout=60)[0], type=dict[str, object])
            assert opening.returncode == 0
            assert opened["opened"] is True
            places = Places(state)
            assert newest(places) == opened["run"]

            async def joined() -> str:
                async with (
                    asyncio.timeout(60),
                    contextlib.aclosing(
                        logs.read_events(places, str(opened["run"]), follow=True, kinds=["service.joined"])
                    ) as events,
                ):
                    async for _, event in events:
                        return str(event.data.url)
                return ""

            assert asyncio.run(joined()).startswith("http://localhost:")
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.wait(30) == 0


def test_open_needs_a_bus(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYRE_NATS", raising=False)
    (tmp_path / "tiny.toml").write_text(TOML)
    assert gyre("open", tmp_path / "tiny.toml", "--state", tmp_path / "state") == 2
    assert "--nats URL" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_an_unknown_instance_is_named(tmp_path: Path) -> None:
    from schemas.errors import ConfigError

    with pytest.raises(ConfigError, match="rollouts-cell-1"):
        service_command(
            "rollouts-cell-1", run="r-1", nats="", state=tmp_path, here=tmp_path, cell="", host="127.0.0.1", port=0
        )
