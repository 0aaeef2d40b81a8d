"""`gyre replay`: files and folders of recorded runs, or a run that goes on, decided again.

Exit code 0: every decision was taken again. 1: one differs. 2: a file is no whole log; what else there is, is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay.logfile import BadLogFile, read
from replay.replayer import DECIDERS, Replayer, ReplayResult, load_deciders
from schemas.errors import ConfigError
from services.cli.output import say, say_json
from services.cli.preflight import code_identity

SUFFIX = ".gyre"


class Replayed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file. Either `result` or `error` is there."""

    file: str
    run: str = ""
    code: str = ""
    """Identity of the code that recorded it."""
    result: ReplayResult | None = None
    error: str = ""

    @property
    def exit_code(self) -> int:
        if self.result is None:
            return BadLogFile.exit_code
        return 0 if self.result.ok else 1


def replay_command(paths: Sequence[Path], names: Sequence[str], *, json: bool) -> int:
    """Several files, or a folder, give a list; one file its own object."""
    files = [file for path in paths for file in _files(path)]
    code = code_identity()
    one = len(paths) == 1 and not paths[0].is_dir()
    replayed = []
    for file in files:
        found = _replay(file, names or list(DECIDERS), code)
        if one and found.result is None:
            raise _Unusable(found.error)
        replayed.append(found)
        if not json:
            for line in _told(found, whole=one):
                say(line)
    worst = max(each.exit_code for each in replayed)
    if json:
        said = [_as_json(each, code) for each in replayed]
        say_json(said[0] if one else {"ok": worst == 0, "replayed_by": code, "logs": said})
    elif not one:
        differ = sum(each.exit_code == 1 for each in replayed)
        unusable = sum(each.exit_code == BadLogFile.exit_code for each in replayed)
        say(f"{len(replayed)} logs: {len(replayed) - differ - unusable} the same, {differ} differ, {unusable} unusable")
    return worst


class _Unusable(BadLogFile):
    def __str__(self) -> str:
        return self.what


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob(f"*{SUFFIX}"))
    if not found:
        raise BadLogFile(f"no *{SUFFIX} file in it", where=str(path), remedy="name a file, or a folder of logs")
    return found


def _replay(file: Path, names: Sequence[str], code: str) -> Replayed:
    deciders = load_deciders(names)
    try:
        log = read(file)
        result = Replayer(deciders=deciders, code=code).replay(log)
    except BadLogFile as error:
        return Replayed(file=str(file), error=str(error))
    return Replayed(file=str(file), run=log.manifest.run, code=log.manifest.code, result=result)


def _as_json(replayed: Replayed, code: str) -> dict[str, Any]:
    result = replayed.result
    if result is None:
        return {"file": replayed.file, "ok": False, "error": replayed.error}
    return {
        "file": replayed.file,
        "run": replayed.run,
        "code": replayed.code,
        "replayed_by": code,
        "ok": result.ok,
        "events": result.events,
        "deciders": result.deciders,
        "admission": result.admission,
        "first": result.first,
    }


def _told(replayed: Replayed, *, whole: bool) -> list[str]:
    result = replayed.result
    if result is None:
        return [f"{replayed.file}: unusable", *(f"  {line}" for line in replayed.error.splitlines())]
    where = "" if whole else f"{replayed.file}: "
    lines = [f"{where}run {replayed.run}, recorded by {replayed.code}: {result.events} events"]
    if whole or not result.ok:
        lines += result_lines(result)
    return lines


def result_lines(result: ReplayResult) -> list[str]:
    """What became of a log, for people."""
    lines = []
    for each in result.deciders:
        tail = f", {each.unrecorded} more that the log ends too early to hold" if each.unrecorded else ""
        lines.append(f"  {each.decider}: {each.same} of {each.recorded} decisions the same on {each.inputs} inputs{tail}")
        if each.stopped:
            lines.append(f"    stopped: {each.stopped}")
    if result.admission is not None:
        draws = result.admission
        lines.append(f"  admission: {draws.same} of {draws.recorded} rows drawn the same from {draws.trees} trees")
    if result.first is not None:
        lines += [f"{result.divergences} differ; the first:", str(result.first)]
    return lines


def refuse_both(paths: Sequence[Path], follow: str) -> None:
    """Raises ConfigError unless either files or a run are named."""
    if bool(paths) == bool(follow):
        raise ConfigError(
            "files and a run are named" if follow else "nothing to replay is named",
            remedy="give a file or a folder of logs, or --follow RUN",
        )
