"""TensorBoard's event files: TFRecords of `Event` messages, as far as scalars need them.

A record is the length (8 bytes, little-endian), the masked CRC-32C of those bytes, the message, its masked CRC-32C. A
message is protocol buffers by the field numbers of TensorFlow's `event.proto` and `summary.proto`. The packages that
write such files load a tensor library or a server for it; these few messages need neither.
"""

from __future__ import annotations

import struct
from pathlib import Path
from types import TracebackType
from typing import IO, Self

SUFFIX = ".gyre"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CASTAGNOLI = 0x82F63B78


class EventFile:
    """One run's curves in a folder of its own, from the beginning: what an earlier life wrote there is replaced.

    A viewer that has read the earlier file is told to forget it. `scalar` buffers; `flush` makes it readable.
    """

    def __init__(self, folder: Path, *, began_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
        # Viewers read the files of a folder in the order of their names.
        number = int(earlier[-1].name.split(".")[4]) + 1 if earlier else 0
        self.path = folder / f"events.out.tfevents.{int(began_s):010d}.{number:06d}{SUFFIX}"
        self._file: IO[bytes] = self.path.open("wb")
        self._write(began_s, 0, _field(3, b"brain.Event:2"))
        # A session that starts at step 0: points of this run that were read before count no more.
        self._write(began_s, 0, _field(7, _integer(1, 1)))
        self.flush()
        for path in earlier:
            path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def scalar(self, tag: str, value: float, *, step: int, time_s: float) -> None:
        """One point; kept as a 32-bit float, as TensorBoard has it."""
        point = _field(1, tag.encode()) + _key(2, _FIXED32) + struct.pack("<f", value)
        self._write(time_s, step, _field(5, _field(1, point)))

    def flush(self) -> None:
        self._file.flush()

    def _write(self, time_s: float, step: int, what: bytes) -> None:
        message = _key(1, _FIXED64) + struct.pack("<d", time_s) + (_integer(2, step) if step else b"") + what
        length = struct.pack("<Q", len(message))
        self._file.write(length + _masked_crc(length) + message + _masked_crc(message))


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _integer(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _field(number: int, value: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _entry(index: int) -> int:
    for _ in range(8):
        index = index >> 1 ^ (_CASTAGNOLI if index & 1 else 0)
    return index


_TABLE = [_entry(index) for index in range(256)]
