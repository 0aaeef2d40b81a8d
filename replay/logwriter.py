"""Writes logs: a file appears whole under its name, or not at all. `replay.logfile` says what is in it.

Writing streams: memory doesn't grow with the log. The same log gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import msgspec
import zstandard

from replay.logfile import NO_CHAIN, Line, Manifest, chain, with_chain
from schemas.errors import GyreError, LogBroken
from services.mesh.bus import Stored

LEVEL = 9
"""Of zstd: twice as small as the fastest, and still faster than events are made."""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest needs of an event that it cannot read further."""

    kind: str
    entity: str = ""
    v: int = 1
    data: msgspec.Raw = msgspec.Raw(b"{}")


class LogWriter:
    """Writes messages as they come; the file appears whole, under its name, at `finish` and not before.

    >>> with LogWriter(path) as writer:
    ...     writer.add(stored)
    ...     manifest = writer.finish()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._body = path.with_name(f".{path.name}.{os.getpid()}.body")
        self._whole = self._body.with_suffix(".whole")
        if path.exists() and not path.is_file():
            # A device or a folder would be replaced, not written to.
            raise GyreError("is there and no file", where=str(path), remedy="name a file, new or to be replaced")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._body.open("wb")
        except OSError as error:
            raise GyreError(
                f"cannot write: {error.strerror}", where=str(path), remedy="choose a folder that you may write to"
            ) from error
        self._out = zstandard.ZstdCompressor(level=LEVEL).stream_writer(self._file, closefd=False)
        self._chain = ""
        self._count, self._first, self._last = 0, 0, 0
        self._first_us, self._last_us = 0, 0
        self._run = ""
        self._started: dict[str, Any] = {}
        self._continued: list[str] = []
        self._kinds: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._body.unlink(missing_ok=True)
        self._whole.unlink(missing_ok=True)

    def add(self, stored: Stored) -> None:
        """The next message. Raises LogBroken when it isn't the one after the last."""
        if self._count and stored.seq != self._last + 1:
            raise LogBroken(f"sequence {stored.seq} follows {self._last}", where=stored.subject)
        self._look_at(stored)
        line = Line(
            seq=stored.seq,
            time_us=stored.time_us,
            subject=stored.subject,
            headers=stored.headers,
            data=msgspec.Raw(stored.data),
            chain=NO_CHAIN,
        )
        raw = _encoder.encode(line)
        self._chain = chain(self._chain, raw)
        self._out.write(with_chain(raw, self._chain) + b"\n")
        if not self._count:
            self._first, self._first_us = stored.seq, stored.time_us
        self._count += 1
        self._last, self._last_us = stored.seq, stored.time_us

    def _look_at(self, stored: Stored) -> None:
        """Takes what the manifest says of the log."""
        try:
            head = _heads.decode(stored.data)
        except msgspec.DecodeError as error:
            raise LogBroken(f"not an envelope: {error}", where=f"sequence {stored.seq} ({stored.subject})") from None
        self._kinds[head.kind] = max(self._kinds.get(head.kind, 0), head.v)
        self._counts[head.kind] = self._counts.get(head.kind, 0) + 1
        if head.kind == "run.started":
            self._run, self._started = head.entity, msgspec.json.decode(head.data)
        elif head.kind == "run.continued":
            self._continued.append(str(msgspec.json.decode(head.data)["code"]))

    def finish(self) -> Manifest:
        """Put the manifest in front and the file in its place."""
        if not self._count:
            raise GyreError("there is no event to export", where=str(self.path), remedy="name a run that was started")
        self._out.close()  # type: ignore[no-untyped-call]
        self._file.close()
        manifest = Manifest(
            run=self._run,
            code=self._started.get("code", ""),
            continued=self._continued,
            flags=self._started.get("flags", []),
            seed=self._started.get("seed", 0),
            config=self._started.get("config", {}),
            kinds=dict(sorted(self._kinds.items())),
            counts=dict(sorted(self._counts.items())),
            messages=self._count,
            first_us=self._first_us,
            last_us=self._last_us,
            first_seq=self._first,
            last_seq=self._last,
            digest=self._chain,
        )
        # The manifest is a zstd frame of its own, so the body needn't be compressed twice.
        with self._whole.open("wb") as whole, self._body.open("rb") as body:
            whole.write(zstandard.ZstdCompressor().compress(_encoder.encode(manifest) + b"\n"))
            shutil.copyfileobj(body, whole)
        self._whole.replace(self.path)
        return manifest


async def export(messages: AsyncIterator[Stored], path: Path) -> Manifest:
    """Write every message of a log that is read from a bus."""
    with LogWriter(path) as writer:
        try:
            async for stored in messages:
                writer.add(stored)
            return writer.finish()
        except OSError as error:
            raise GyreError(
                f"cannot write: {error.strerror}", where=str(path), remedy="free space there, or choose another folder"
            ) from error


_encoder = msgspec.json.Encoder(order="deterministic")
_heads = msgspec.json.Decoder(_Head)
