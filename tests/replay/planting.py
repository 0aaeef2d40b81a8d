"""Another version of the deciders beside the one that runs: a text of one source file replaced, everything that is built on
it imported anew for as long as the test looks at it.

Nothing is written to disk, and what was imported before is as it was afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

ROOT = Path(__file__).parents[2]
_ANEW = ("replay", "services.scheduler", "services.trajectories", "services.packer")
"""Packages that hold a decider, or what calls one."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """`old` is in the file at `path` exactly once."""

    path: str
    old: str
    new: str

    def text(self) -> str:
        text = (ROOT / self.path).read_text()
        assert text.count(self.old) == 1, f"{self.old!r} is {text.count(self.old)} times in {self.path}"
        return text.replace(self.old, self.new)


@contextlib.contextmanager
def planted(change: Change) -> Iterator[ModuleType]:
    """The module `replay.replayer` of the changed code."""
    finder = _Finder(change)
    before = {name: module for name, module in sys.modules.items() if _anew(name)}
    holders = [(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in _ANEW if "." in name]
    held = [(holder, name, getattr(holder, name)) for holder, name in holders if hasattr(holder, name)]
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("replay.replayer")
        assert finder.loaded, f"{change.path} is not imported by a replay"
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _anew(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        for holder, name, module in held:
            setattr(holder, name, module)


def _anew(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in _ANEW)


class _Finder(MetaPathFinder):
    def __init__(self, change: Change) -> None:
        self._change = change
        self._name = change.path.removesuffix(".py").replace("/", ".")
        self.loaded = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.loaded = True
        where = str(ROOT / self._change.path)
        return spec_from_file_location(fullname, where, loader=_Loader(fullname, where, self._change.text()))


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)
