"""Printing: one JSON object, or text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec


def say(text: str = "") -> None:
    print(text, flush=True)  # noqa: T201  this is the output


def say_json(value: Any) -> None:
    """One object, indented, keys as they are declared."""
    say(msgspec.json.format(msgspec.json.encode(value)).decode())


def say_json_line(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


def quiet_logs() -> None:
    """What our libraries log goes to standard error, and only warnings do: standard output is the answer's."""
    import logging

    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns aligned to the left; the last one is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
