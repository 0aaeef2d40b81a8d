"""Pictures of a run: roles of cells, waterlevel against capacity, ready groups, micro-steps and publications over time.

    events ──> `tracks` ──> one JSON document (`model`) ──> SVG (`svg`), a page that stands alone (`html`)

Fed with events, so it draws simulated and real logs alike. `assets/` is the page; the part of its script that asks the
document (`model.js`) knows nothing of the part that draws (`view.js`) and of the page's controls (`page.js`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from replay.timeline import html, svg
from replay.timeline.model import Document
from replay.timeline.tracks import LISTED, Tracks
from schemas.envelope import Event
from schemas.errors import ConfigError

__all__ = ["LISTED", "Document", "Tracks", "draw", "fold", "write"]


def fold(events: Iterable[Event], *, title: str = "", limit: int | None = LISTED) -> Document:
    """The document of a whole log."""
    tracks = Tracks(title, limit=limit)
    for event in events:
        tracks.see(event)
    return tracks.take()


def draw(document: Document, suffix: str) -> bytes:
    """The document as what the suffix says: .svg, .html, or .json, which is the document itself."""
    return _FORMATS[suffix](document)


def written_as(path: Path) -> str:
    """The suffix of a file that a timeline can be written to. Raises ConfigError for another."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(
            f"a timeline is not written as {path.suffix or 'a file without suffix'}",
            where=str(path),
            remedy=f"end its name with one of {', '.join(_FORMATS)}",
        )
    return path.suffix.lower()


def write(document: Document, path: Path) -> int:
    """Draw into a file; its size in bytes. Raises ConfigError when it cannot be written."""
    data = draw(document, written_as(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"cannot write: {error.strerror}", where=str(path), remedy="choose a file that you may write to"
        ) from None
    return len(data)


_FORMATS: dict[str, Callable[[Document], bytes]] = {
    ".svg": lambda document: svg.draw(document).encode(),
    ".html": lambda document: html.page(document).encode(),
    ".json": msgspec.json.encode,
}
