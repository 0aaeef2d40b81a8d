"""Planted bugs: does the net catch fish? Each is a small patch such as an engineer might write on a good day.

    patch ── a copy of the code, planted ── seeds 0, 1, 2 ... in it ── the first that violates something

A patch begins with a few lines that say what its author had in mind and what comes of it; a diff against `services/`
follows. The first seeds are run twice, in processes whose sets have other orders: a planted bug that makes two logs of one
seed is caught by that. A process that doesn't come to an end, in time or in memory, is a catch too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from schemas.errors import GyreError

FOLDER = Path("tests/fault/planted")
SEEDS = 200
"""Within which every planted bug must be found."""
TWICE = 3
"""Seeds that are run in a second process."""
TIME_S = 3600.0
"""After which a process counts as one that doesn't end."""
_CODE = ("schemas", "services", "replay")
_TURNED = "0"
"""PYTHONHASHSEED of the first process; the second has another."""


class StalePatch(GyreError):
    """A planted bug that can't be planted: the code around it has changed."""


class Catch(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one planted bug."""

    patch: str
    about: str
    seeds: int
    """How many were needed; 0: it was not found."""
    violation: str = ""
    """The first of that seed."""
    invariants: list[str] = []
    """All that the seed violated."""

    @property
    def found(self) -> bool:
        return self.seeds > 0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What `replay.fault.catch` says of each seed."""

    seed: int
    digest: str
    violations: list[str] = []
    invariants: list[str] = []


def patches(folder: Path = FOLDER) -> list[Path]:
    """In the order of their numbers. Raises GyreError where there are none."""
    found = sorted(folder.glob("*.patch"))
    if not found:
        raise GyreError("there are no planted bugs", where=str(folder), remedy="run it in the repository")
    return found


def about(patch: Path) -> str:
    """What it says of itself, on one line."""
    return " ".join(patch.read_text().partition("diff --git")[0].split())


def check_applies(patch: Path, tree: Path) -> None:
    """Raises StalePatch where it doesn't."""
    _apply(patch, tree, "--check")


def plant(patch: Path, tree: Path, into: Path) -> None:
    """Copies the code of `tree` and applies the patch to the copy. Raises StalePatch where it doesn't apply."""
    for name in _CODE:
        # With times, so that what is compiled is still good for what isn't patched.
        shutil.copytree(tree / name, into / name)
    _apply(patch, into)


def fish(patch: Path, *, tree: Path, seeds: int = SEEDS, time_s: float = TIME_S) -> Catch:
    """Run seeds in the planted code until one violates something."""
    with tempfile.TemporaryDirectory(prefix="gyre-planted-") as made:
        into = Path(made)
        plant(patch, tree, into)
        line = first_caught(into, tree, seeds=seeds, time_s=time_s)
    if line is None:
        return Catch(patch=patch.stem, about=about(patch), seeds=0)
    return Catch(
        patch=patch.stem,
        about=about(patch),
        seeds=line.seed + 1,
        violation=line.violations[0],
        invariants=line.invariants,
    )


def first_caught(code: Path, clean: Path, *, seeds: int = SEEDS, time_s: float = TIME_S) -> Line | None:
    """The first seed that violates something in this code and nothing in the clean one; None where there is none."""
    twice = min(TWICE, seeds)
    lines = run(code, 0, twice, time_s=time_s)
    if not any(line.violations for line in lines):
        again = run(code, 0, twice, time_s=time_s, hash_seed="1")
        for line, other in zip(lines, again, strict=False):
            if line.digest != other.digest:
                what = f"seed {line.seed} gives another log in a process whose sets have another order"
                return msgspec.structs.replace(line, violations=[what], invariants=["same-log"])
        lines = run(code, twice, seeds - twice, time_s=time_s)
    while lines and lines[-1].violations:
        last = lines[-1]
        # What the clean code violates as well has another cause.
        if not any(line.violations for line in run(clean, last.seed, 1, time_s=time_s)):
            return last
        lines = run(code, last.seed + 1, seeds - last.seed - 1, time_s=time_s)
    return None


def run(code: Path, first: int, count: int, *, time_s: float = TIME_S, hash_seed: str = _TURNED) -> list[Line]:
    """Seeds in the code at this place, up to the first that violates something. Raises GyreError where it can't run."""
    if count < 1:
        return []
    command = [sys.executable, "-m", "replay.fault.catch", str(first), str(count)]
    # Before what is there already: packages may be found by it alone.
    path = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, cwd=code, env=environment, capture_output=True, text=True, timeout=time_s, check=False
        )
        said, code_, errors = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        said, code_, errors = (error.stdout or b"").decode(), -1, ""
    lines = _lines(said)
    if code_ == -1 or "MemoryError" in errors:
        seed = first + len(lines)
        lines.append(Line(seed=seed, digest="", violations=[f"seed {seed} does not end"], invariants=["no-end"]))
    elif code_ != 0:
        raise GyreError("the planted code cannot be run", where=str(code), remedy=errors.strip()[-1500:])
    return lines


def _lines(said: str) -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for line in said.splitlines() if line]


def _apply(patch: Path, tree: Path, *options: Sequence[str] | str) -> None:
    # One line of context on each side: code nearby may change without making the patch stale.
    command = ["git", "apply", "-C1", *map(str, options), str(patch.absolute())]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.absolute().parent)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StalePatch(
            f"this planted bug doesn't apply any more: {done.stderr.strip()}",
            where=str(patch),
            remedy="plant it anew in the code as it is now; the lines above its diff say what it is",
        )
