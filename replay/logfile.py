"""Exported logs: one `.gyre` file holds every event of a run, as it lay in the stream.

zstd-compressed JSON Lines. The first line is the manifest; then one line a message: seq, time_us, subject, headers, data
(the event's bytes, unchanged) and `chain`, a digest of the line before it and of its own content. Invariants, checked
while reading:

- sequences follow each other without a gap;
- each line's chain follows from the line before, so the first line that was altered, moved or lost is named;
- count and last chain are the manifest's.

Reading and writing stream: memory doesn't grow with the log.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

import msgspec
import zstandard

from schemas.envelope import Event
from schemas.errors import GyreError, LogBroken
from schemas.events import RunStarted
from schemas.kinds import KINDS
from services.mesh.bus import Stored
from services.mesh.codec import decode

FORMAT = "gyre-log"
VERSION = 1
_CHAIN_BYTES = 8
_LINE_LIMIT = 64 << 20
_READ = 1 << 18


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says of itself."""

    format: str = FORMAT
    version: int = VERSION
    run: str
    code: str
    """Identity of the code that ran, from `run.started`."""
    kinds: dict[str, int]
    """Schema version of each kind that occurs."""
    messages: int
    first_seq: int
    last_seq: int
    digest: str
    """Chain of the last line."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    time_us: int
    subject: str
    headers: dict[str, str]
    data: msgspec.Raw
    chain: str = ""

    def stored(self) -> Stored:
        return Stored(
            seq=self.seq, time_us=self.time_us, subject=self.subject, headers=self.headers, data=bytes(self.data)
        )


class BadLogFile(GyreError):
    """A log file is not what was exported, or no log file at all."""

    exit_code = 2


_encoder = msgspec.json.Encoder(order="deterministic")
_lines = msgspec.json.Decoder(Line)
_manifests = msgspec.json.Decoder(Manifest)


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
        self._out = zstandard.ZstdCompressor(level=9).stream_writer(self._file, closefd=False)
        self._chain = ""
        self._count, self._first, self._last = 0, 0, 0
        self._run, self._code = "", ""
        self._kinds: dict[str, int] = {}

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
        event = decode(stored)
        known = KINDS.get(event.kind)
        self._kinds.setdefault(event.kind, known.v if known else 0)
        if event.kind == "run.started":
            started: RunStarted = event.data
            self._run, self._code = event.entity, started.code
        line = Line(
            seq=stored.seq,
            time_us=stored.time_us,
            subject=stored.subject,
            headers=stored.headers,
            data=msgspec.Raw(stored.data),
        )
        self._chain = chain(self._chain, line)
        self._out.write(_encoder.encode(msgspec.structs.replace(line, chain=self._chain)) + b"\n")
        self._count += 1
        self._first = self._first or stored.seq
        self._last = stored.seq

    def finish(self) -> Manifest:
        """Put the manifest in front and the file in its place."""
        if not self._count:
            raise GyreError("there is no event to export", where=str(self.path), remedy="name a run that was started")
        self._out.close()  # type: ignore[no-untyped-call]
        self._file.close()
        manifest = Manifest(
            run=self._run,
            code=self._code,
            kinds=dict(sorted(self._kinds.items())),
            messages=self._count,
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


def read_manifest(path: Path) -> Manifest:
    """The first line. Raises BadLogFile when the file is something else."""
    return _manifest(next(_raw_lines(path), b""), path)


def read_messages(path: Path) -> Iterator[Stored]:
    """Every message in order. Raises BadLogFile that names the first place where the file is damaged."""
    lines = _raw_lines(path)
    manifest = _manifest(next(lines, b""), path)
    last, previous, count = manifest.first_seq - 1, "", 0
    for number, raw in enumerate(lines, start=2):
        try:
            line = _lines.decode(raw)
        except msgspec.DecodeError as error:
            raise _bad(path, f"line {number} (after sequence {last}) is no message: {error}") from None
        name = _name(line)
        if line.seq != last + 1:
            what = "is missing" if line.seq > last + 1 else "is out of order"
            raise _bad(path, f"line {number}: sequence {last + 1} {what}; {name} is there")
        previous = chain(previous, line)
        if line.chain != previous:
            raise _bad(path, f"line {number}: {name} was altered after the export")
        last, count = line.seq, count + 1
        yield line.stored()
    if count != manifest.messages or previous != manifest.digest:
        raise _bad(path, f"ends after sequence {last}, {count} of {manifest.messages} messages are there")


def read_events(path: Path) -> list[Event]:
    """The whole log, decoded."""
    try:
        return [decode(stored) for stored in read_messages(path)]
    except LogBroken as error:
        raise _bad(path, str(error)) from error


def chain(previous: str, line: Line) -> str:
    """Digest of the line before and of this line's content, in hex."""
    digest = hashlib.blake2b(previous.encode(), digest_size=_CHAIN_BYTES)
    digest.update(_encoder.encode(msgspec.structs.replace(line, chain="")))
    return digest.hexdigest()


def _raw_lines(path: Path) -> Iterator[bytes]:
    rest = b""
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as data:
            while block := data.read(_READ):
                *whole, rest = (rest + block).split(b"\n")
                yield from whole
                if len(rest) > _LINE_LIMIT:
                    raise _bad(path, "a line is longer than any event")
    except FileNotFoundError:
        raise BadLogFile("no such file", where=str(path), remedy="make one with `gyre export RUN -o FILE`") from None
    except OSError as error:
        raise BadLogFile(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from error
    except zstandard.ZstdError as error:
        raise _bad(path, f"is no zstd file, or damaged: {error}") from error
    if rest:
        yield rest


def _manifest(line: bytes, path: Path) -> Manifest:
    try:
        manifest = _manifests.decode(line)
    except msgspec.DecodeError:
        raise _bad(path, "has no manifest in its first line") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise _bad(path, f"has format {manifest.format} {manifest.version}; this version reads {FORMAT} {VERSION}")
    return manifest


def _name(line: Line) -> str:
    # subject: gyre.{run}.{owner}.{entity}.{id}.{verb}, and the id may hold a dot.
    parts = line.subject.split(".")
    if len(parts) < 6:
        return f"sequence {line.seq}"
    return f"sequence {line.seq} ({parts[3]}.{parts[-1]} {'.'.join(parts[4:-1])} by {parts[2]})"


def _bad(path: Path, what: str) -> BadLogFile:
    return BadLogFile(what, where=str(path), remedy="export the run again with `gyre export RUN -o FILE`")
