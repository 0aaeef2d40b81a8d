"""What a run needs and a command makes: starting policy, tasks. Made once, kept in the cache, made again when the
recipe changes.

    cache/{makes} -> .made/{makes}-{key}

The key is a digest of the command, of the files that it names, and of our own code that it imports; so an edited recipe
gets a new key, and two configurations share a cache. A folder appears whole or not at all.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from schemas.config import Config, Prepare
from schemas.errors import ConfigError, GyreError
from services.mesh.processes import die_with, last_line

OUR_PACKAGES = ("schemas", "services", "replay")
_ROOT = Path(__file__).parents[2]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One `[[prepare]]` with its place in the cache."""

    makes: str
    command: list[str]
    """`{out}` still open."""
    link: Path
    made: Path

    @property
    def ready(self) -> bool:
        return self.made.exists()

    @property
    def log(self) -> Path:
        return self.made.with_name(self.made.name + ".log")


Tell = Callable[[Step, str], None]
"""Called when a command begins, with an empty text, and then now and then with its last line."""
_TELL_S = 1.0


def steps(config: Config, *, cache: Path, here: Path) -> list[Step]:
    """In the order of the configuration. Raises ConfigError for a recipe that cannot work."""
    return [_step(prepare, cache=cache, here=here) for prepare in config.prepare]


def make(step: Step, *, tell: Tell | None = None) -> None:
    """Make what is missing and point the cache's name at it."""
    if not step.ready:
        _run(step, tell or (lambda step, text: None))
    if not (step.link.is_symlink() and step.link.readlink() == _target(step)):
        if step.link.exists() and not step.link.is_symlink():
            raise ConfigError(
                "is there and was not made by the configuration's command",
                where=str(step.link),
                remedy="move it away, or point the configuration at it and drop the [[prepare]]",
            )
        new = step.link.with_name(f".{step.link.name}.{os.getpid()}.link")
        new.symlink_to(_target(step))
        new.replace(step.link)


def key_of(command: list[str], *, here: Path) -> str:
    """Digest of a recipe, 12 hex digits."""
    digest = hashlib.blake2b(msgspec.json.encode([sys.version_info[:2], command]), digest_size=6)
    for path in sorted(_inputs(command, here)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _step(prepare: Prepare, *, cache: Path, here: Path) -> Step:
    name = Path(prepare.makes)
    if name.is_absolute() or ".." in name.parts or len(name.parts) != 1 or name.name.startswith("."):
        raise ConfigError(
            f"prepare.makes = {prepare.makes!r} is no plain name",
            remedy="give the name of one file or folder; it is made in the cache",
        )
    if not any("{out}" in word for word in prepare.command):
        raise ConfigError(
            f"the command that makes {prepare.makes!r} never says {{out}}",
            where="prepare.command",
            remedy="pass {out}, the path at which the result is expected",
        )
    filled = {"python": sys.executable, "here": str(here)}
    command = [_fill(word, filled) for word in prepare.command]
    made = cache / ".made" / f"{prepare.makes}-{key_of(prepare.command, here=here)}"
    return Step(makes=prepare.makes, command=command, link=cache / prepare.makes, made=made)


def _fill(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def _run(step: Step, tell: Tell) -> None:
    out = step.made.with_name(f"{step.made.name}.part{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    _clear(step)
    parent = os.getpid()
    tell(step, "")
    try:
        with step.log.open("wb") as log:
            try:
                done = subprocess.Popen(
                    [_fill(word, {"out": str(out)}) for word in step.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=lambda: die_with(parent),  # noqa: PLW1509  there is one thread
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot run {step.command[0]}: {error.strerror}",
                    where=f"prepare {step.makes}",
                    remedy="correct the command",
                ) from error
            with done:
                try:
                    _watch(done, step, tell)
                except BaseException:
                    done.kill()
                    raise
        if done.returncode:
            said = last_line(step.log) or "nothing"
            raise GyreError(
                f"the command that makes {step.makes!r} ended with {done.returncode}; last it said: {said}",
                where=str(step.log),
                remedy="read that log and correct the cause",
            )
        if not out.exists():
            raise ConfigError(
                f"the command that makes {step.makes!r} left nothing at {{out}}",
                where=str(step.log),
                remedy="correct the command",
            )
        out.replace(step.made)
    finally:
        _clear(step)


def _watch(process: subprocess.Popen[bytes], step: Step, tell: Tell) -> None:
    said = ""
    while True:
        try:
            process.wait(_TELL_S)
            return
        except subprocess.TimeoutExpired:
            last = last_line(step.log)
            if last != said:
                said = last
                tell(step, last)


def _clear(step: Step) -> None:
    """Removes what one that was ended left, beside `{out}` too; only one process makes anything here at a time."""
    for left in step.made.parent.glob(f"*{step.made.name}.part*"):
        _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _target(step: Step) -> Path:
    return Path(".made") / step.made.name


def _inputs(command: list[str], here: Path) -> set[Path]:
    """Files that the command reads its recipe from: those it names, what its module imports of ours, and the programs
    beside the configuration, one folder deep."""
    found = {*here.glob("*.py"), *here.glob("*/*.py")}
    for word in command:
        path = Path(_fill(word, {"here": str(here)}))
        if path.is_absolute() and path.is_file():
            found.add(path)
    for flag, module in pairwise(command):
        if flag == "-m" and module.split(".")[0] in OUR_PACKAGES:
            found |= _closure(module)
    return found


def _closure(module: str) -> set[Path]:
    """Source files of a module or package of ours, and of all modules of ours that they import."""
    seen: set[Path] = set()
    todo = list(_files(module))
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imports(path):
            todo += [each for each in _files(name, package=False) if each not in seen]
    return seen


def _files(module: str, *, package: bool = True) -> Iterator[Path]:
    # By path and not by an import, which would load what the module needs.
    base = _ROOT.joinpath(*module.split("."))
    if (base / "__init__.py").is_file():
        yield from base.glob("*.py") if package else [base / "__init__.py"]
    elif base.with_suffix(".py").is_file():
        yield base.with_suffix(".py")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in OUR_PACKAGES)
