"""`gyre events`, `export`, `check`."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from schemas.errors import ConfigError
from services.cli.output import quiet_logs, say, say_json, say_json_line
from services.cli.places import Places


def events_command(run: str | None, *, follow: bool, kinds: list[str], state: Path, json: bool) -> int:
    quiet_logs()
    _known(kinds)
    places = Places(state)
    asyncio.run(_print_events(places, places.chosen(run), follow=follow, kinds=kinds, json=json))
    return 0


def _known(patterns: list[str]) -> None:
    """Raises ConfigError for a pattern that no kind of event matches."""
    from difflib import get_close_matches
    from fnmatch import filter as matching

    from schemas.kinds import KINDS

    for pattern in patterns:
        if not matching(KINDS, pattern):
            known = sorted({*KINDS, *(f"{kind.split('.')[0]}.*" for kind in KINDS)})
            near = get_close_matches(pattern, known, 1)
            remedy = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"no kind of event is called {pattern!r}", remedy=f"{remedy}`gyre schema` lists them all")


async def _print_events(places: Places, run: str, *, follow: bool, kinds: list[str], json: bool) -> None:
    from services.cli.logs import event_line, read_events

    began = 0
    async with contextlib.aclosing(read_events(places, run, follow=follow, kinds=kinds)) as events:
        async for _, event in events:
            began = began or event.time_us
            if json:
                say_json_line(event)
            else:
                say(event_line(event, began_us=began))


def export_command(run: str | None, output: Path | None, *, state: Path, json: bool) -> int:
    from services.cli.logs import export_run

    quiet_logs()
    places = Places(state)
    chosen = places.chosen(run)
    path = output or Path(f"{chosen}.gyre")
    manifest = asyncio.run(export_run(places, chosen, path))
    if json:
        say_json({"file": str(path), "bytes": path.stat().st_size, "manifest": manifest})
    else:
        say(f"{path}: {manifest.messages} events of {manifest.run}, {path.stat().st_size / 1e6:.2f} MB")
    return 0


def check_command(file: Path, names: list[str], *, json: bool) -> int:
    """0: every invariant holds. 1: one doesn't. 2: the file is not a whole log."""
    from replay.checker import check
    from replay.logfile import read

    report = check(read(file), only=names)
    if json:
        say_json({"ok": report.ok, "events": report.events, "checked": report.checked, "violations": report.violations})
        return 0 if report.ok else 1
    for each in report.checked:
        mark = "skipped" if each.skipped else f"{each.violations} violated" if each.violations else "ok"
        say(f"  {each.invariant:26s} {mark:10s} {each.meaning}" + (f" ({each.skipped})" if each.skipped else ""))
    for violation in report.violations[:20]:
        say(str(violation))
    say(f"{report.events} events: " + ("all invariants hold" if report.ok else f"{len(report.violations)} violations"))
    return 0 if report.ok else 1
