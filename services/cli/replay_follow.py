"""`gyre replay --follow RUN`: a second set of deciders beside a run that goes on. It reads LOG and says nothing there.

A difference is told as soon as the log shows it. Where a decider now decides more than was recorded, that is when the
running one answers a later input.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from replay.divergence import Divergence
from replay.replayer import DECIDERS, Replay, Replayer, load_deciders
from schemas.envelope import Event
from services.cli.output import quiet_logs, say, say_json_line
from services.cli.places import Places
from services.cli.preflight import code_identity
from services.cli.replay_command import result_lines


def follow_command(run: str, names: Sequence[str], *, state: Path, json: bool) -> int:
    """0 when the run is over and every decision was taken again, 1 when one differed."""
    quiet_logs()
    places = Places(state)
    replay = Replayer(deciders=load_deciders(names or DECIDERS), code=code_identity()).begin()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_follow(places, places.chosen(run), replay, json=json))
    for _ in replay.end():
        pass
    result = replay.result()
    if json:
        say_json_line({"ok": result.ok, "events": result.events, "deciders": result.deciders, "admission": result.admission})
    else:
        for line in [f"{result.events} events", *result_lines(result)]:
            say(line)
    return 0 if result.ok else 1


async def _follow(places: Places, run: str, replay: Replay, *, json: bool) -> None:
    from services.cli.logs import read_events

    async with contextlib.aclosing(read_events(places, run, follow=True)) as events:
        async for _, event in events:
            for found in beside(replay, event):
                if json:
                    say_json_line({"divergence": found})
                else:
                    say(str(found))


def beside(replay: Replay, event: Event) -> list[Divergence]:
    """Feeds the next event of a run that goes on; divergences that weren't known before it."""
    known = {name: len(shadow.divergences) for name, shadow in replay.shadows.items()}
    replay.feed([event])
    return [found for name, shadow in replay.shadows.items() for found in shadow.divergences[known[name] :]]
