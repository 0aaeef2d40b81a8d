"""A host's disk in memory: folders that outlive the processes of the host, not the host.

What is written is whole or absent, as services write by renaming. `full`, `damage`, `mend` and `wipe` are faults.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Disk:
    """Folder path to what lies in it, by name. Values are held by reference."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.full = False
        self._copies: dict[str, dict[str, Any]] = {}
        """What was whole when it was damaged, until something is written there or a copy is put back."""

    def __repr__(self) -> str:
        return f"<Disk [{len(self.folders)} folders{', full' if self.full else ''}]>"

    def make(self, folder: str | Path) -> None:
        """An empty folder, whatever was there. Raises OSError."""
        self._check(folder)
        self._copies.pop(str(folder), None)
        self.folders[str(folder)] = {}

    def write(self, folder: str | Path, name: str, value: Any) -> None:
        """Raises OSError where the folder is absent or the disk is full."""
        self._check(folder)
        known = self.folders.get(str(folder))
        if known is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        known[name] = value

    def read(self, folder: str | Path, name: str) -> Any:
        """None where there is nothing."""
        return self.folders.get(str(folder), {}).get(name)

    def remove(self, folder: str | Path) -> None:
        self.folders.pop(str(folder), None)

    def damage(self, folder: str | Path, become: Callable[[Any], Any] | None) -> bool:
        """Fault: each thing that lies there becomes another, or all is gone. Whether it was whole."""
        name = str(folder)
        known = self.folders.pop(name, {})
        if become is not None and known:
            self.folders[name] = {each: become(value) for each, value in known.items()}
        whole = bool(known) and name not in self._copies
        if whole:
            self._copies[name] = known
        return whole

    def mend(self, folder: str | Path) -> None:
        """A copy of what was damaged is put back, unless something newer lies there."""
        copy = self._copies.pop(str(folder), None)
        if copy is not None:
            self.folders[str(folder)] = copy

    def wipe(self) -> None:
        """Fault: the host is gone."""
        self.folders.clear()

    def _check(self, folder: str | Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))


class Damaged:
    """In place of what was written."""

    def __repr__(self) -> str:
        return "<Damaged>"


DAMAGED = Damaged()
