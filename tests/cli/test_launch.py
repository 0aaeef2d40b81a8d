"""A run of scripted services over a real event bus, from its first process to its last."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from replay.checker import check
from replay.logfile import read_events
from schemas import events as e
from schemas import streams
from schemas.config import Config
from schemas.envelope import Event
from schemas.errors import ConfigError, EnvironmentMissing
from services.cli import background, logs, run_command
from services.cli.figures import Summary, summarize
from services.cli.launch import GivenUp, Plan, launch
from services.cli.places import Places
from services.cli.progress import Progress
from services.cli.resuming import abandon, differences
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.nats_bus import connect
from services.mesh.processes import is_alive, read_mesh
from services.mesh.publisher import Publisher
from services.mesh.server import NatsServer
from services.mesh.supervise import Backoff
from tests.cli.conftest import Remembering

Planner = Callable[..., Plan]


async def run(config: Config, places: Places, plan: Plan, view: Remembering, tmp_path: Path) -> tuple[Summary, int]:
    async with asyncio.timeout(60):
        with places.hold("test"):
            return await launch(config, tasks=[], here=tmp_path, places=places, view=view, plan=plan, settle_s=0.5)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_a_run_from_start_to_end(config: Config, places: Places, plan: Planner, go: Path, tmp_path: Path) -> None:
    before = children()
    seen: dict[str, object] = {}

    def react(progress: Progress) -> None:
        if len(progress.steps) == 2 and not seen:
            live = places.live()
            assert live is not None
            seen.update(mesh=live, holder=places.holder())
            go.write_text("go")

    view = Remembering(react)
    summary, signum = await run(config, places, plan("scheduler", "worker"), view, tmp_path)
    assert signum == 0
    assert summary.finished == "steps_done"
    assert summary.ok, summary
    figures = summary.figures
    assert (figures["steps"], figures["reward_first5"], figures["harness_calls"]) == (2, 0.375, 3)
    assert figures["reconnects"] == 1
    assert figures["peak_rss_gb"] > 0

    # While it ran, others could find it; now nothing of it lives.
    mesh = seen["mesh"]
    assert [each.name for each in mesh.services] == ["scheduler", "worker"]
    assert seen["holder"].pid == os.getpid()  # type: ignore[union-attr, attr-defined]
    assert children() <= before
    [folder] = places.runs.iterdir()
    assert places.live() is None
    assert places.newest() == folder.name
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert len((folder / "secret").read_bytes()) == 32
    assert msgspec.json.decode((folder / "summary.json").read_bytes())["ok"] is True

    # The log outlives the mesh: it can be exported, checked and shown.
    manifest = await logs.export_run(places, folder.name, tmp_path / "run.gyre")
    events = read_events(tmp_path / "run.gyre")
    assert manifest.run == folder.name
    assert events[0].kind == "run.started"
    assert events[0].id == f"{folder.name}.started"
    assert check(events, only=["ledger", "said_once"]).ok
    said = [event.kind async for _, event in logs.read_events(places, folder.name, kinds=["batch.*", "run.finished"])]
    assert said == ["batch.stepped", "batch.stepped", "run.finished"]
    status = await background.status(places, folder.name)
    assert not status.up
    assert status.figures["steps"] == 2
    assert {each.health for each in status.services} == {"gone"}
    assert children() <= before


async def stopped(config: Config, places: Places, plan: Plan, tmp_path: Path) -> Summary:
    """A run that a signal stopped after its second step."""

    def react(progress: Progress) -> None:
        if len(progress.steps) == 2 and not progress.finished:
            os.kill(os.getpid(), signal.SIGINT)
            view.react = lambda progress: None

    view = Remembering(react)
    summary, signum = await run(config, places, plan, view, tmp_path)
    assert signum == signal.SIGINT
    assert "asked to stop" in view.notes
    return summary


async def said(places: Places, run: str, *kinds: str) -> list[Event]:
    return [event async for _, event in logs.read_events(places, run, kinds=list(kinds))]


async def test_a_run_that_was_stopped_goes_on(
    config: Config, places: Places, plan: Planner, go: Path, tmp_path: Path
) -> None:
    before = children()
    first = await stopped(config, places, plan("scheduler"), tmp_path)
    assert first.finished == ""
    assert children() <= before
    assert await said(places, first.run, "run.finished") == []
    assert not (await background.status(places, first.run)).finished
    told: list[object] = []

    def react(progress: Progress) -> None:
        if not told:
            told.append(asyncio.get_running_loop().run_in_executor(None, go.write_text, "go"))

    view = Remembering(react)
    second, signum = await run(config, places, plan("scheduler"), view, tmp_path)
    assert (signum, second.run, second.finished) == (0, first.run, "steps_done")
    assert f"run {first.run} goes on" in view.notes
    figures = second.figures
    assert (figures["steps"], figures["harness_calls"]) == (2, 3), "over the whole run"
    assert figures["peak_rss_gb"] >= first.figures["peak_rss_gb"]  # type: ignore[operator]
    [continued] = await said(places, first.run, "run.continued")
    assert continued.owner == "operator"
    assert len(list(places.runs.iterdir())) == 1


async def test_a_run_goes_on_only_as_it_began_and_new_begins_another(
    config: Config, places: Places, plan: Planner, go: Path, tmp_path: Path
) -> None:
    first = await stopped(config, places, plan("scheduler"), tmp_path)
    other = msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, lr=0.5))
    with pytest.raises(ConfigError, match=r"is not finished, and it has .* now it is 0\.5") as caught:
        await run(other, places, plan("scheduler"), Remembering(), tmp_path)
    assert caught.value.where == "trainer.lr"
    assert "--new" in caught.value.remedy
    told: list[object] = []

    def react(progress: Progress) -> None:
        if not told:
            told.append(asyncio.get_running_loop().run_in_executor(None, go.write_text, "go"))

    async with asyncio.timeout(60):
        with places.hold("test"):
            second, _ = await launch(
                other, tasks=[], here=tmp_path, places=places, view=Remembering(react), plan=plan("scheduler"), new=True
            )
    assert second.run != first.run
    assert second.finished == "steps_done"
    [over] = await said(places, first.run, "run.finished")
    assert (over.owner, over.data.reason, over.data.steps) == ("operator", "stopped", 2)


async def test_the_end_of_a_run_is_said_once(config: Config, nats_server: NatsServer) -> None:
    """Also when the scheduler said it after the operator had looked."""
    run = "r-20260102-0304-5f3d"
    async with await connect(nats_server.url, run, name="test") as bus:
        await bus.open_run()
        scheduler = Publisher(bus=bus, clock=SystemClock(), run=run, owner="scheduler", instance="scheduler")
        await scheduler.say("run.finished", run, e.RunFinished(steps=2, reason="steps_done"), id=f"{run}.done")
        await abandon(bus, run)
        log = streams.log_stream(run)
        events = [decode(stored) async for stored in bus.read_range(log, 0, await bus.last_seq(log))]
    assert [event.owner for event in events] == ["scheduler"]


def test_the_summary_is_told_before_the_failure(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing(*args: object, **kwargs: object) -> tuple[Summary, int]:
        raise GivenUp(EnvironmentMissing("it failed 5 times in a row"), summarize(Progress(), peak_rss_bytes=1))

    monkeypatch.setattr(run_command, "launch", failing)
    monkeypatch.setattr(run_command, "prepared", lambda *args, **kwargs: None)
    monkeypatch.setattr(run_command.preflight, "environment", lambda *args: None)
    monkeypatch.setattr(run_command.preflight, "inputs", lambda *args: ([], []))
    with pytest.raises(GivenUp, match="5 times") as caught:
        run_command.train(config_file, [], state=tmp_path / "state", json=False, quiet=True)
    assert caught.value.exit_code == 3
    out = capsys.readouterr().out
    assert "was stopped and is not finished" in out
    assert "harness_errors" in out


def test_what_a_stopped_run_may_still_reach_is_not_missed(places: Places) -> None:
    summary = msgspec.structs.replace(
        summarize(Progress(), peak_rss_bytes=1),
        targets={"steps": ">= 20", "harness_errors": "== 0"},
        missed=["steps", "harness_errors"],
    )
    for finished, steps in (("", "not yet"), ("steps_done", "missed")):
        lines = run_command.closing(msgspec.structs.replace(summary, finished=finished), places, again="gyre run FILE")
        marks = {line.split()[0]: line for line in lines if "wanted" in line}
        assert f"{steps}, wanted >= 20" in marks["steps"]
        assert "missed, wanted == 0" in marks["harness_errors"]


def test_the_first_key_that_differs_is_named() -> None:
    before = {"a": 1, "b": {"c": [1], "d": 2}}
    assert list(differences(before, before)) == []
    assert list(differences(before, {"a": 1, "b": {"c": [2], "d": 2}})) == [("b.c", [1], [2])]
    assert list(differences(before, {"a": 1, "b": {"c": [1]}, "e": 3})) == [("b.d", 2, "absent"), ("e", "absent", 3)]


async def test_a_service_that_keeps_failing_stops_the_run(
    config: Config, places: Places, plan: Planner, tmp_path: Path
) -> None:
    before = children()
    view = Remembering()
    with pytest.raises(GivenUp, match=r"libabsent\.so\.9") as caught:
        await run(config, places, plan("scheduler", "crash"), view, tmp_path)
    assert caught.value.exit_code == EnvironmentMissing.exit_code
    assert caught.value.summary.finished == ""
    figures = caught.value.summary.figures
    assert (figures["steps"], figures["crashes"]) == (2, Backoff().limit)
    assert caught.value.where.endswith("logs/crash.log")
    assert "something keeps failing: stopping" in view.notes
    assert (
        "crash ended with 1 (ImportError: libabsent.so.9: cannot open shared object file); it starts again"
        in view.notes
    )
    assert children() <= before
    assert places.live() is None


async def test_a_killed_service_comes_back(
    config: Config, places: Places, plan: Planner, go: Path, tmp_path: Path
) -> None:
    killed: list[int] = []

    def react(progress: Progress) -> None:
        if len(progress.steps) == 2 and not killed:
            mesh = places.live()
            assert mesh is not None
            worker = next(each for each in mesh.services if each.name == "worker")
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    class Waiting(Remembering):
        def note(self, text: str) -> None:
            super().note(text)
            if "worker runs again" in text:
                go.write_text("go")

    view = Waiting(react)
    summary, _ = await run(config, places, plan("scheduler", "worker"), view, tmp_path)
    assert summary.ok
    mesh = read_mesh(places.run(places.newest() or ""))
    assert mesh is not None
    worker = next(each for each in mesh.services if each.name == "worker")
    assert worker.restarts == 1
    assert worker.pid != killed[0]
    assert not is_alive(worker.pid, worker.created)


async def test_what_cannot_begin_leaves_no_run(config: Config, places: Places, plan: Planner, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = msgspec.structs.replace(config, bus=msgspec.structs.replace(config.bus, port=port))
        with pytest.raises(EnvironmentMissing, match=f"port {port}"):
            await run(busy, places, plan("scheduler"), Remembering(), tmp_path)
    assert not places.runs.exists()
    assert places.holder() is None
