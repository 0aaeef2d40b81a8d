"""`gyre replay --follow RUN`: a second set of deciders beside a run that goes on. It reads LOG and says nothing there.

A difference is told as soon as the log shows it. Where a decider now decides more than was recorded, that is when the
running one answers a later input. A run that nobody keeps up is replayed to where its log ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from replay.divergence import Divergence
from replay.replayer import DECIDERS, Replay, Replayer, load_deciders
from schemas.envelope import Event
from schemas.errors import GyreError
from services.cli.logs import log_end, open_log, read_log
from services.cli.output import quiet_logs, say, say_json_line
from services.cli.places import Places
from services.cli.preflight import code_identity
from services.cli.replay_command import result_lines

Found = Callable[[Divergence], None]


class Unreadable(GyreError):
    """The run, or its log, can't be read."""

    exit_code = 2


def follow_command(run: str, names: Sequence[str], *, state: Path, json: bool) -> int:
    """0 when the run is over, or we are interrupted, and every decision was taken again; 1 when one differed.

    Raises Unreadable, or ConfigError for a decider that there is not."""
    quiet_logs()
    replay = Replayer(deciders=load_deciders(names or DECIDERS), code=code_identity()).begin()

    def found(each: Divergence) -> None:
        say_json_line({"divergence": each}) if json else say(str(each))

    def caught_up(events: int) -> None:
        line = {"caught_up": {"run": run, "events": events, "ok": replay.result().ok}}
        say_json_line(line) if json else say(f"{run}: {events} events until now; what comes is decided as it comes")

    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(follow(Places(state), run, replay, found=found, caught_up=caught_up))
    except GyreError as error:
        raise Unreadable(error.what, where=error.where, remedy=error.remedy) from error
    for _ in replay.end():
        pass
    result = replay.result()
    if json:
        say_json_line(
            {"ok": result.ok, "events": result.events, "deciders": result.deciders, "admission": result.admission}
        )
    else:
        for line in [f"{result.events} events", *result_lines(result)]:
            say(line)
    return 0 if result.ok else 1


async def follow(
    places: Places, run: str, replay: Replay, *, found: Found, caught_up: Callable[[int], None] = lambda events: None
) -> None:
    """Feeds the run's log until the run is over. `found` is told each divergence, `caught_up` how many events there were
    when we came, once they are replayed. Raises GyreError when there is no such run or log."""
    run = places.chosen(run)
    async with open_log(places, run) as bus:
        end = await log_end(bus, run)
        async with contextlib.aclosing(read_log(bus, run, follow=places.goes_on(run))) as events:
            async for _, event in events:
                for each in beside(replay, event):
                    found(each)
                if event.seq == end:
                    caught_up(end)


def beside(replay: Replay, event: Event) -> list[Divergence]:
    """Feeds the next event of a run that goes on; divergences that weren't known before it."""
    known = replay.found
    replay.feed([event])
    return [each for each in replay.found if not any(each is other for other in known)]
