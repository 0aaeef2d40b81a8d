"""`gyre replay --follow`: deciders beside a run that goes on. A recorded log is published to a real server, event by event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from replay.divergence import Divergence
from replay.logfile import read
from replay.replayer import Replay, Replayer
from schemas import streams
from schemas.errors import GyreError
from services.cli.app import app
from services.cli.places import Places
from services.cli.replay_follow import follow
from services.mesh.bus import Stored
from services.mesh.server import NatsServer
from tests.cli.command import gyre
from tests.golden.simulated import KEPT
from tests.replay.planting import Change, planted
from tests.replay.published import LOG, opened, publish, stopped

REAL = KEPT / "quickstart-async.gyre"
LONGER = Change(
    path="services/scheduler/core/dispatch.py",
    old="steps=mu,",
    new="steps=mu + index // 2,",
)


@pytest.fixture
def messages() -> list[Stored]:
    return list(read(LOG).messages())


@pytest.fixture
def run() -> str:
    return read(LOG).manifest.run


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Of this test alone: it is stopped and started again, and a run's name is in its log."""
    own = NatsServer(tmp_path / "nats")
    await own.start_async()
    yield own
    await own.stop_async()


def cause_of(messages: list[Stored], seq: int) -> int:
    return int(msgspec.json.decode(messages[seq - 1].data)["causation"])


class Follower:
    """`follow` as a task, and what it was told."""

    def __init__(self, state: Path, run: str, replay: Replay | None = None) -> None:
        self.replay = replay or Replayer().begin()
        self.found: asyncio.Queue[Divergence] = asyncio.Queue()
        self.caught_up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            follow(Places(state), run, self.replay, found=self.found.put_nowait, caught_up=self.caught_up.set_result)
        )


async def test_it_sees_a_whole_run_across_a_restart_of_the_server(
    server: NatsServer, messages: list[Stored], run: str, tmp_path: Path
) -> None:
    half = len(messages) // 2
    async with opened(server, run, tmp_path) as bus:
        await publish(bus, messages[:half])
        follower = Follower(tmp_path, run)
        assert await follower.caught_up == half
        await server.stop_async()
        await server.start_async()
        await publish(bus, messages[half:])
        # It ends by itself: the log says that the run is over.
        await follower.task
    result = follower.replay.result()
    assert result.ok and result.events == len(messages) and follower.found.empty()
    assert all(each.recorded == each.same > 0 for each in result.deciders)


async def test_a_difference_is_told_before_a_real_run_goes_on(server: NatsServer, tmp_path: Path) -> None:
    """The second burst of a recorded quickstart is longer than ours would be."""
    log = read(REAL)
    messages = list(islice(log.messages(), 1200))
    seq = next(each.seq for each in log if each.kind == "burst.opened" and each.data.index == 2)
    with planted(LONGER) as replayer:
        async with opened(server, log.manifest.run, tmp_path) as bus:
            await publish(bus, messages[: seq - 100])
            follower = Follower(tmp_path, log.manifest.run, replayer.Replayer().begin())
            assert await follower.caught_up == seq - 100
            assert follower.found.empty()
            await publish(bus, messages[seq - 100 : seq])
            # Nothing more is in the log when this comes.
            first = await follower.found.get()
            follower.task.cancel()
            await asyncio.wait([follower.task])
    assert (first.decider, first.recorded_seq, first.seq) == ("scheduler", seq, cause_of(messages, seq))
    assert first.input is not None and first.input.kind == "weights.published"
    assert (first.shape, first.reason) == ("different", "different")
    assert [each.path for each in first.differences] == ["data.steps"]
    assert not follower.replay.result().ok


async def test_the_command_tells_each_as_it_comes_and_ends_with_the_run(
    server: NatsServer, messages: list[Stored], run: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    async with opened(server, run, tmp_path) as bus:
        await publish(bus, messages)
    words = ["replay", "--follow", run, "--state", str(tmp_path)]
    assert await asyncio.to_thread(app, words) == 0
    said = capfdbinary.readouterr().out.decode().splitlines()
    assert said[0].startswith(f"{run}: {len(messages)} events until now")
    assert said[1] == f"{len(messages)} events" and "decisions the same on" in said[2]
    assert await asyncio.to_thread(app, [*words, "--json"]) == 0
    caught_up, result = map(msgspec.json.decode, capfdbinary.readouterr().out.splitlines())
    assert caught_up == {"caught_up": {"run": run, "events": len(messages), "ok": True}}
    assert result["ok"] and result["events"] == len(messages)


async def test_the_command_fails_where_a_decision_differs(
    server: NatsServer, messages: list[Stored], run: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    seq = next(each.seq for each in read(LOG) if each.kind == "burst.opened" and each.data.index == 2)
    altered = msgspec.structs.replace(
        messages[seq - 1], data=messages[seq - 1].data.replace(b'"steps":1', b'"steps":2')
    )
    async with opened(server, run, tmp_path) as bus:
        await publish(bus, [*messages[: seq - 1], altered, *messages[seq:]])
    assert await asyncio.to_thread(app, ["replay", "--follow", run, "--state", str(tmp_path), "--json"]) == 1
    told, *_, result = map(msgspec.json.decode, capfdbinary.readouterr().out.splitlines())
    assert told["divergence"]["recorded_seq"] == seq
    assert [each["path"] for each in told["divergence"]["differences"]] == ["data.steps"]
    assert not result["ok"]


def test_a_run_that_nobody_keeps_up_is_replayed_to_where_its_log_ends(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mesh was stopped in the middle: the log lies in the store, and nobody will write to it."""
    asyncio.run(stopped(tmp_path, events=300))
    assert app(["replay", "--follow", run, "--state", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "300 events"
    assert app(["events", "--follow", "--run", run, "--state", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 300


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--follow", "r-1"], "no run r-1"),
        (["--follow", "r-1", "--decider", "nobody"], "no decider is called 'nobody'"),
        ([], "nothing to replay is named"),
    ],
)
def test_what_cannot_be_followed_is_no_difference(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gyre("replay", *words, "--state", tmp_path) == 2
    assert what in capsys.readouterr().err


async def test_a_log_that_cannot_be_read_is_no_difference(
    server: NatsServer, messages: list[Stored], run: str, tmp_path: Path
) -> None:
    async with opened(server, run, tmp_path) as bus:
        await publish(bus, messages[:5])
        await bus.publish(streams.log_stream(run), messages[5].subject, b"no event", msg_id="x")
    with pytest.raises(GyreError, match="sequence 6") as caught:
        await asyncio.to_thread(app, ["replay", "--follow", run, "--state", str(tmp_path)])
    assert caught.value.exit_code == 2
