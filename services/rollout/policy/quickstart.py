"""The quickstart's world in memory: its agent's conversation, its cards, and a workspace that is a dictionary.

The conversation and the cards are the files under `examples/quickstart`, loaded by path: demonstrations are made by the
code that sends the real requests. The workspace answers the two tools as a shell would for what a tiny policy writes.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from schemas.errors import EnvironmentMissing

FOLDER = Path(__file__).parents[3] / "examples" / "quickstart"
SHELL_ERROR = "bash: line 1: {}: command not found"


class Card(NamedTuple):
    """What a task's `in.txt` holds."""

    name: str
    color: str
    size: str

    @property
    def line(self) -> str:
        """`in.txt` without its newline."""
        return ",".join(self)

    @property
    def solution(self) -> list[str]:
        """The four lines that the tests want."""
        return [f"name={self.name}", f"color={self.color}", f"size={self.size}", "done"]


class Quickstart(NamedTuple):
    """The two modules of the quickstart, loaded."""

    conversation: ModuleType
    tasks: ModuleType

    @property
    def cards(self) -> list[Card]:
        """Every card there is."""
        return [Card(*card) for card in self.tasks.CARDS]


def load_quickstart(folder: Path = FOLDER) -> Quickstart:
    """Load `conversation.py` and `make_tasks.py` of `folder`. Raises EnvironmentMissing where they are absent."""
    return Quickstart(_module(folder / "conversation.py"), _module(folder / "make_tasks.py"))


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise EnvironmentMissing(
            f"there is no {path.name}", where=str(path.parent), remedy="run from a checkout of the repository"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Workspace:
    """The files of one execution. `run_tool` answers a tool_use block as the agent's own function of that name does."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.files = {"in.txt": card.line + "\n"}

    def run_tool(self, call: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """The tool_result block of one call."""
        text, failed = self._outcome(call["name"], call["input"], {tool["name"]: tool for tool in tools})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": text[:200]}
        return {**result, "is_error": True} if failed else result

    def _outcome(self, name: str, given: dict[str, Any], tools: dict[str, Any]) -> tuple[str, bool]:
        if name not in tools:
            return "no such tool: " + name, True
        required = tools[name]["input_schema"]["required"]
        missing = [argument for argument in required if not isinstance(given.get(argument), str)]
        if missing:
            return "missing: " + ", ".join(missing), True
        if name == "bash":
            return self._shell(given["command"])
        self.files[given["path"]] = given["content"]
        return "ok", False

    def _shell(self, command: str) -> tuple[str, bool]:
        try:
            words = shlex.split(command)
        except ValueError:
            return "bash: -c: line 1: unexpected EOF while looking for matching quote", True
        if not words:
            return "(no output)", False
        if words[0] != "cat":
            return SHELL_ERROR.format(words[0]), True
        texts = [self.files.get(path, f"cat: {path}: No such file or directory\n") for path in words[1:]]
        return "".join(texts).rstrip("\n") or "(no output)", any(path not in self.files for path in words[1:])

    def reward(self) -> float:
        """The share of right lines in `out.txt`, as tests/test.sh counts them."""
        lines = self.files.get("out.txt", "").split("\n")
        return sum(a == b for a, b in zip(lines, self.card.solution, strict=False)) / 4
