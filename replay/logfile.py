"""Exported logs: one `.gyre` file holds every event of a run, as it lay in the stream.

zstd-compressed JSON Lines, described for other tools in docs/log-files.md. The first line is the manifest; then one line
a message: seq, time_us, subject, headers, data (the event's bytes, unchanged) and `chain`, a digest of the line before it
and of its own content. Invariants, checked while reading:

- sequences follow each other without a gap;
- each line's chain follows from the line before, so the first line that was altered, moved or lost is named;
- count and last chain are the manifest's.

Reading streams: memory doesn't grow with the log. `replay.logwriter` writes.

    >>> log = read(Path("run.gyre"))
    >>> log.manifest.messages
    1042
    >>> for event in log: ...
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

from schemas.envelope import Envelope, Event
from schemas.errors import GyreError, LogBroken
from services.mesh.bus import Stored
from services.mesh.codec import KnownEnvelope, known_event, to_event

FORMAT = "gyre-log"
VERSION = 1
_CHAIN_BYTES = 8
NO_CHAIN = "0" * (2 * _CHAIN_BYTES)
_LINE_LIMIT = 64 << 20
_READ = 1 << 16
"""Bytes of lines at a time: what is made of them stays in the processor's caches."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says of itself."""

    format: str = FORMAT
    version: int = VERSION
    run: str
    code: str
    """Identity of the code that ran, from `run.started`."""
    continued: list[str] = []
    """Identity of the code that went on with the run, each time that it was continued."""
    flags: list[str] = []
    """Decision flags of the run."""
    seed: int = 0
    config: dict[str, Any] = {}
    """The run's configuration, as `run.started` has it."""
    kinds: dict[str, int]
    """Highest schema version of each kind that occurs."""
    counts: dict[str, int] = {}
    """Messages of each kind."""
    messages: int
    first_us: int = 0
    """Stored time of the first message, in microseconds since the epoch."""
    last_us: int = 0
    first_seq: int
    last_seq: int
    digest: str
    """Chain of the last line."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Keys are written in this order, `chain` last."""

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


class _Bare(msgspec.Struct, frozen=True, kw_only=True):
    """What an event needs of a line."""

    seq: int
    time_us: int
    subject: str
    data: Envelope
    chain: str


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """The same of a line whose event this version knows: nothing in it is decoded twice."""

    seq: int
    time_us: int
    subject: str
    data: KnownEnvelope
    chain: str


class BadLogFile(GyreError):
    """A log file is not what was exported, or no log file at all."""

    exit_code = 2


_lines = msgspec.json.Decoder(Line)
_bare = msgspec.json.Decoder(_Bare)
_known = msgspec.json.Decoder(_Known)
_CHAIN_END = -len(b'"}')
_CHAIN_AT = _CHAIN_END - 2 * _CHAIN_BYTES
_manifests = msgspec.json.Decoder(Manifest)


class Log:
    """A log file, open for any number of readings. Raises BadLogFile when it is something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)

    def __repr__(self) -> str:
        return f"<Log {self.path} [{self.manifest.messages} messages of {self.manifest.run}]>"

    def __len__(self) -> int:
        return self.manifest.messages

    def __iter__(self) -> Iterator[Event]:
        """Every event in order. Raises BadLogFile that names the first place where the file is damaged."""
        try:
            yield from _checked(self.path, _event, _known, _bare)
        except LogBroken as error:
            raise _bad(self.path, str(error)) from error

    def messages(self) -> Iterator[Stored]:
        """As they lay in the stream."""
        return read_messages(self.path)

    def data_of(self, seq: int) -> bytes:
        """What the event at this sequence says, as it was written: JSON. Empty when there is no such event."""
        for line in _checked(self.path, lambda line: line, _bare):
            if line.seq == seq:
                return bytes(line.data.data)
        return b""


def read(path: Path | str) -> Log:
    """A log file, ready to be read. Raises BadLogFile."""
    return Log(Path(path))


def read_manifest(path: Path) -> Manifest:
    """The first line. Raises BadLogFile when the file is something else."""
    blocks = _raw_blocks(path)
    try:
        return _manifest(next(blocks, [b""])[0], path)
    finally:
        blocks.close()


def read_messages(path: Path) -> Iterator[Stored]:
    """Every message in order. Raises BadLogFile that names the first place where the file is damaged."""
    yield from _checked(path, Line.stored, _lines)


def read_events(path: Path) -> list[Event]:
    """The whole log, decoded."""
    return list(Log(path))


_T = TypeVar("_T")


def _checked(
    path: Path,
    take: Callable[[Any], _T],
    decoder: msgspec.json.Decoder[Any],
    otherwise: msgspec.json.Decoder[Any] | None = None,
) -> Iterator[_T]:
    """What is taken of each line, or of what `otherwise` makes of lines that the decoder refuses. What lies before damage
    comes before it is told."""
    blocks = _raw_blocks(path)
    head = next(blocks, [b""])
    manifest = _manifest(head[0], path)
    first, previous = manifest.first_seq, ""
    last = first - 1
    for lines in itertools.chain([head[1:]], blocks):
        decoded, error = _decoded(lines, decoder, otherwise)
        began, damage = last, ""
        for raw, line in zip(lines, decoded, strict=False):
            if line.seq != last + 1:
                what = "is missing" if line.seq > last + 1 else "is out of order"
                damage = f": sequence {last + 1} {what}; {_name(line)} is there"
                break
            previous = chain(previous, raw)
            if line.chain != previous:
                damage = f": {_name(line)} was altered after the export"
                break
            last += 1
        else:
            if error is not None:
                damage = f" (after sequence {last}) is no message: {error}"
        yield from map(take, decoded[: last - began])
        if damage:
            raise _bad(path, f"line {last - first + 3}{damage}")
    count = last - first + 1
    if count != manifest.messages or previous != manifest.digest:
        raise _bad(path, f"ends after sequence {last}, {count} of {manifest.messages} messages are there")


def _decoded(
    lines: list[bytes], decoder: msgspec.json.Decoder[Any], otherwise: msgspec.json.Decoder[Any] | None
) -> tuple[list[Any], msgspec.DecodeError | None]:
    """The lines up to the first that is no message, and why that is none."""
    decoded: list[Any] = []
    while len(decoded) < len(lines):
        try:
            decoded.extend(map(decoder.decode, lines[len(decoded) :]))
        except msgspec.DecodeError as error:
            if otherwise is None:
                return decoded, error
            try:
                decoded.append(otherwise.decode(lines[len(decoded)]))
            except msgspec.DecodeError as again:
                return decoded, again
    return decoded, None


def _event(line: _Known | _Bare) -> Event:
    if isinstance(line, _Bare):
        return to_event(line.data, seq=line.seq, time_us=line.time_us)
    return known_event(line.data, seq=line.seq, time_us=line.time_us)


def with_chain(raw: bytes, digest: str) -> bytes:
    """The line's bytes with this chain instead of the one that it has."""
    return raw[:_CHAIN_AT] + digest.encode() + raw[_CHAIN_END:]


def chain(previous: str, raw: bytes) -> str:
    """Digest, in hex, of the chain of the line before and of this line's bytes, its own chain left empty."""
    digest = hashlib.blake2b(previous.encode(), digest_size=_CHAIN_BYTES)
    digest.update(raw[:_CHAIN_AT])
    digest.update(raw[_CHAIN_END:])
    return digest.hexdigest()


def _raw_blocks(path: Path) -> Generator[list[bytes]]:
    """The lines, as many at a time as are read at once."""
    rest = b""
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as data:
            while block := data.read(_READ):
                lines = (rest + block).split(b"\n")
                rest = lines.pop()
                if len(rest) > _LINE_LIMIT:
                    raise _bad(path, "a line is longer than any event")
                if lines:
                    yield lines
    except FileNotFoundError:
        raise BadLogFile("no such file", where=str(path), remedy="make one with `gyre export RUN -o FILE`") from None
    except OSError as error:
        raise BadLogFile(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from error
    except zstandard.ZstdError as error:
        raise _bad(path, f"is no zstd file, or damaged: {error}") from error
    if rest:
        yield [rest]


def _manifest(line: bytes, path: Path) -> Manifest:
    try:
        manifest = _manifests.decode(line)
    except msgspec.DecodeError:
        raise _bad(path, "has no manifest in its first line") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise _bad(path, f"has format {manifest.format} {manifest.version}; this version reads {FORMAT} {VERSION}")
    return manifest


def _name(line: Line | _Bare | _Known) -> str:
    # subject: gyre.{run}.{owner}.{entity}.{id}.{verb}, and the id may hold a dot.
    parts = line.subject.split(".")
    if len(parts) < 6:
        return f"sequence {line.seq}"
    return f"sequence {line.seq} ({parts[3]}.{parts[-1]} {'.'.join(parts[4:-1])} by {parts[2]})"


def _bad(path: Path, what: str) -> BadLogFile:
    return BadLogFile(what, where=str(path), remedy="export the run again with `gyre export RUN -o FILE`")
