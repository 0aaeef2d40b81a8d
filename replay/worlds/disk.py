"""A host's disk in memory: folders that outlive the processes of the host, not the host.

What is written is whole or absent, as services write by renaming. `full`, `damage` and `wipe` are faults.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any


class Disk:
    """Folder path to what lies in it, by name. Values are held by reference."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.full = False
        self._copies: dict[str, dict[str, Any]] = {}
        """What was whole when it was damaged last."""

    def __repr__(self) -> str:
        return f"<Disk [{len(self.folders)} folders{', full' if self.full else ''}]>"

    def make(self, folder: str | Path) -> None:
        """An empty folder, whatever was there. Raises OSError."""
        self._check(folder)
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

    def damage(self, folder: str | Path, *, gone: bool = False) -> bool:
        """Fault: what lies there can't be read any more, or is gone. Whether something whole lay there."""
        known = self.folders.pop(str(folder), {})
        if known and not gone:
            self.folders[str(folder)] = dict.fromkeys(known, DAMAGED)
        whole = bool(known) and DAMAGED not in known.values()
        if whole:
            self._copies[str(folder)] = known
        return whole

    def mend(self, folder: str | Path) -> None:
        """A copy of what lay there last is put back, unless something whole lies there."""
        if all(value is DAMAGED for value in self.folders.get(str(folder), {}).values()):
            self.folders[str(folder)] = self._copies[str(folder)]

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
