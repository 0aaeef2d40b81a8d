"""A timeline as a page that stands alone: one file, which loads nothing and sends nothing.

The document lies in the page packed: its columns of sequences and times as differences, JSON, gzip, base64. The browser
undoes that with what it has (`DecompressionStream`).
"""

from __future__ import annotations

import base64
import gzip
import html
import importlib.resources

import msgspec

from replay.timeline.model import Document
from replay.timeline.palette import DARK, LIGHT, MEANING, variables

SCRIPTS = ("model.js", "scale.js", "view.js", "panel.js", "page.js")
DIFFERENCES = {"events": ("seq", "t", "cause"), "changes": ("seq", "t"), "reasons": ("seq",)}
"""Columns that are packed as the difference to the row before."""


def page(document: Document) -> str:
    """The whole page."""
    parts = {
        "title": html.escape(document.title),
        "style": f":root{{{variables(LIGHT)}}}\n:root[data-ground=dark]{{{variables(DARK)}}}\n{asset('page.css')}",
        "data": pack(document),
        "script": "\n".join(asset(name) for name in SCRIPTS),
        "meaning": msgspec.json.encode(MEANING).decode(),
    }
    text = asset("page.html")
    for name, value in parts.items():
        text = text.replace(f"@{name}@", value, 1)
    return text


def pack(document: Document) -> str:
    tree = msgspec.to_builtins(document)
    for table, columns in DIFFERENCES.items():
        for column in columns:
            values = tree[table][column]
            tree[table][column] = [after - before for before, after in zip([0, *values], values, strict=False)]
    return base64.b64encode(gzip.compress(msgspec.json.encode(tree), 9, mtime=0)).decode()


def unpack(packed: str) -> Document:
    """What `pack` packed. For whoever wants the data of a page without its page."""
    tree = msgspec.json.decode(gzip.decompress(base64.b64decode(packed)))
    for table, columns in DIFFERENCES.items():
        for column in columns:
            total, values = 0, []
            for difference in tree[table][column]:
                total += difference
                values.append(total)
            tree[table][column] = values
    return msgspec.convert(tree, Document)


def asset(name: str) -> str:
    return importlib.resources.files("replay.timeline").joinpath("assets", name).read_text()
