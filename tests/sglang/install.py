"""Makes SGLang's own environment in .venv-sglang: `make sglang`, or `python -m tests.sglang.install`.

It shares nothing with .venv: SGLang pins packages of its own, and we talk to it over HTTP only. Made once, and again when
`requirements.txt` changes; complete or without its stamp.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import sys
import time
from pathlib import Path

from tests.harnesses.install import NotInstalled, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-sglang"
PYTHON = FOLDER / "bin" / "python"
PINS = Path(__file__).with_name("requirements.txt")
PIP = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
INSTALL_S = 1800


def installed() -> bool:
    """Whether the environment is there and of the pins as they are now."""
    stamp = FOLDER / ".stamp"
    return stamp.exists() and stamp.read_text() == _stamp()


def install() -> None:
    """Make the environment if it isn't there. Raises NotInstalled."""
    with (ROOT / ".venv-sglang.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed():
            return
        shutil.rmtree(FOLDER, ignore_errors=True)
        pins = PINS.read_text().split()
        (torch,) = (pin for pin in pins if pin.startswith("torch=="))
        run([sys.executable, "-m", "venv", str(FOLDER)], INSTALL_S)
        # With what it needs on this platform; the others are all in the list.
        run([*PIP, "-c", str(PINS), torch], INSTALL_S)
        run([*PIP, "--no-deps", "-r", str(PINS)], INSTALL_S)
        (FOLDER / ".stamp").write_text(_stamp())


def _stamp() -> str:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return hashlib.blake2b(PINS.read_bytes() + version.encode(), digest_size=16).hexdigest()


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.sglang.install", description=__doc__).parse_args()
    begin = time.monotonic()
    try:
        install()
    except NotInstalled as why:
        print(f"SGLang: not installed: {why}", file=sys.stderr)
        return 1
    size = sum({s.st_ino: s.st_size for f in FOLDER.rglob("*") if (s := f.lstat())}.values()) / 1e9
    print(f"SGLang in {FOLDER.name} ({size:.1f} GB, {time.monotonic() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
