"""Stands in for packages whose code runs on a GPU only, so that SGLang can be imported without one.

Whatever such a package is asked for is there: submodules, names, attributes of names. It may be imported, passed on and
compared; to call it is an error that says so. Nothing here computes, so no result can come from it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


def dunder(name: str) -> bool:
    """Names that Python itself looks for, and finds absent."""
    return name[:2] == name[-2:] == "__"


class Name:
    """A name of the package, whatever it would have been."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<{self.path}, on a GPU>"

    def __getattr__(self, name: str) -> Name:
        if dunder(name):
            raise AttributeError(name)
        return Name(f"{self.path}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self.path} needs a GPU, and this is a stand-in for its package")


class Package(ModuleType):
    """The package, or a module of it."""

    def __getattr__(self, name: str) -> Any:
        if dunder(name):
            raise AttributeError(name)
        return Name(f"{self.__name__}.{name}")


class Modules(MetaPathFinder, Loader):
    """Finds every submodule of the packages that are stood in for."""

    packages: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        known = fullname.partition(".")[0] in self.packages
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(package: str) -> None:
    """Called by the package's own `__init__`."""
    if not Modules.packages:
        sys.meta_path.insert(0, Modules())
    Modules.packages.add(package)
    sys.modules[package].__class__ = Package
