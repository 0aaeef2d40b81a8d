"""`gyre tensorboard`: a reader of the log like any other, in a process of its own; nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from services.cli.event_file import EventFile
from services.cli.logs import read_events
from services.cli.output import quiet_logs, say, say_json_line
from services.cli.places import Places
from services.cli.scalars import Scalars

POLL_S = 1.0


def tensorboard_command(run: str | None, *, logdir: Path, follow: bool, state: Path, json: bool) -> int:
    quiet_logs()
    places = Places(state)
    if follow and run is None:
        asyncio.run(_each_run(places, logdir, json=json))
    else:
        asyncio.run(_tell(places, places.chosen(run), logdir, follow=follow, json=json))
    return 0


async def _each_run(places: Places, logdir: Path, *, json: bool) -> None:
    """The newest run, then every one that comes after it, until somebody ends us."""
    written = None
    while True:
        run = places.newest()
        if run is None or run == written:
            await asyncio.sleep(POLL_S)
            continue
        await _tell(places, run, logdir, follow=True, json=json)
        written = run


async def _tell(places: Places, run: str, logdir: Path, *, follow: bool, json: bool) -> None:
    points = await write_curves(places, run, logdir, follow=follow)
    if json:
        say_json_line({"run": run, "folder": str(logdir / run), "points": points})
    else:
        say(f"{logdir / run}: {points} points; see them with tensorboard --logdir {logdir}")


async def write_curves(places: Places, run: str, logdir: Path, *, follow: bool = False) -> int:
    """Writes `logdir/run` from the log's beginning; with `follow` until the run is over. Returns how many points."""
    scalars, file, count = Scalars(), None, 0
    with contextlib.ExitStack() as stack:
        async with contextlib.aclosing(read_events(places, run, follow=follow)) as events:
            async for _, event in events:
                if file is None:
                    file = stack.enter_context(EventFile(logdir / run, began_s=event.time_us / 1e6))
                points = scalars.apply(event)
                for point in points:
                    file.scalar(point.curve, point.value, step=point.step, time_s=point.time_s)
                if points:
                    file.flush()
                count += len(points)
    return count
