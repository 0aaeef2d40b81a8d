"""`gyre timeline`: the picture or the page of an exported log."""

from __future__ import annotations

from pathlib import Path

from services.cli.output import say, say_json


def timeline_command(file: Path, output: Path, *, title: str, json: bool) -> int:
    """0: it was drawn. 2: the file is not a whole log, or the other cannot be written."""
    from replay.logfile import read_events
    from replay.timeline import fold, write, written_as

    written_as(output)
    document = fold(read_events(file), title=title)
    size = write(document, output)
    if json:
        say_json(
            {
                "file": str(output),
                "bytes": size,
                "run": document.run,
                "cells": len(document.cells),
                "events": document.last - document.first + 1,
                "listed": len(document.events.seq),
                "left_out": document.left_out,
            }
        )
        return 0
    say(f"{output}: {document.title}, {len(document.cells)} cells, {document.last - document.first + 1} events, {size} bytes")
    if document.left_out:
        say(f"  not listed in it, for there are too many: {', '.join(f'{n} {kind}' for kind, n in document.left_out.items())}")
    return 0
