"""What the services of a run had to complain of: their logs, counted.

A service logs one JSON object a line. What isn't one comes from a library or is Python's own last words: of those only
tracebacks count.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

TRACEBACK = b"Traceback (most recent call last):"


class Complaints(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of all logs of one run."""

    warnings: int = 0
    errors: int = 0
    """Of level error or critical."""
    tracebacks: int = 0
    """Exceptions that nobody mapped to an error of ours."""


class _Line(msgspec.Struct):
    level: str = ""
    exception: str = ""


def complaints(logs: Path) -> Complaints:
    """Counts over every `*.log` of a folder; all zero where there is none."""
    warnings = errors = tracebacks = 0
    for path in sorted(logs.glob("*.log")):
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = msgspec.json.decode(raw, type=_Line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    tracebacks += raw.startswith(TRACEBACK)
                    continue
                warnings += line.level == "warning"
                errors += line.level in ("error", "critical")
                tracebacks += TRACEBACK.decode() in line.exception
    return Complaints(warnings=warnings, errors=errors, tracebacks=tracebacks)
