"""Installs the harness programs of harnesses.toml: `python -m tests.harnesses.install [NAME ...]`, all without a name.

One folder each in state/harnesses, named by the version and stamped when complete. Several processes may ask for the
same one. What cannot be installed says why: no npm, no network, a platform without the program.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("harnesses.toml")
FOLDER = ROOT / "state" / "harnesses"
INSTALL_S = 600
"""Seconds that a package manager has."""


class NotInstalled(Exception):
    """With the reason."""


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    registry: Literal["npm", "pypi"]
    package: str
    version: str
    program: str
    """Path in the folder of the installation."""
    automatic: bool
    """Whether tests install it by themselves."""
    needs: list[str] = []
    """Packages of the same registry that are installed beside it, pinned."""

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.package.replace('/', '-').removeprefix('@')}-{self.version}"

    @property
    def path(self) -> Path:
        return self.folder / self.program

    @property
    def installed(self) -> bool:
        return (self.folder / ".stamp").exists()


def harnesses() -> dict[str, Harness]:
    """All of harnesses.toml, by name."""
    return msgspec.convert(tomllib.loads(DATA.read_text()), dict[str, Harness])


def install(harness: Harness) -> Path:
    """The program, installed if it wasn't. Raises NotInstalled."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f".{harness.folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not harness.installed:
            shutil.rmtree(harness.folder, ignore_errors=True)
            harness.folder.mkdir()
            for command in _commands(harness):
                run(command)
            if not harness.path.exists():
                raise NotInstalled(f"{harness.package} {harness.version} has no {harness.program} on this platform")
            (harness.folder / ".stamp").touch()
    return harness.path


def _commands(harness: Harness) -> list[list[str]]:
    folder, spec = str(harness.folder), f"{harness.package}@{harness.version}"
    if harness.registry == "npm":
        if shutil.which("npm") is None:
            raise NotInstalled("npm is not on the PATH: install Node.js")
        quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
        return [["npm", "install", "--prefix", folder, *quiet, spec, *harness.needs]]
    pip = [f"{folder}/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    return [
        [sys.executable, "-m", "venv", folder],
        [*pip, *(each.replace("@", "==") for each in (spec, *harness.needs))],
    ]


def run(command: list[str], timeout_s: float = INSTALL_S) -> None:
    """One step of an installation. Raises NotInstalled with what it said last."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise NotInstalled(f"{command[0]} ended with {done.returncode}: {' '.join(said[-3:])}")


def main() -> int:
    known = harnesses()
    arguments = argparse.ArgumentParser(prog="python -m tests.harnesses.install", description=__doc__)
    arguments.add_argument("names", nargs="*", choices=[*known, []], help="of harnesses.toml; all without one")
    failed = 0
    for name in arguments.parse_args().names or known:
        harness, begin = known[name], time.monotonic()
        try:
            path = install(harness)
        except NotInstalled as why:
            print(f"{name} {harness.version}: not installed: {why}", file=sys.stderr)
            failed = 1
        else:
            size = sum({s.st_ino: s.st_size for f in harness.folder.rglob("*") if (s := f.lstat())}.values()) / 1e6
            print(f"{name} {harness.version}: {path} ({size:.0f} MB, {time.monotonic() - begin:.1f} s)")
    return failed


if __name__ == "__main__":
    sys.exit(main())
