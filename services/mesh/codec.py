"""Between events and the bytes that lie in LOG.

Decoding never fails on a kind or a field that this version does not know: such an event keeps its data raw, so that an
older subscriber skips it. Data of an earlier schema version is made into this one's. Anything that is not an envelope is LogBroken.
"""

from __future__ import annotations

import functools
from datetime import date, timedelta
from typing import Any, Literal, Union, cast

import msgspec

from schemas import streams
from schemas.envelope import Envelope, Event
from schemas.errors import BusError, LogBroken
from schemas.kinds import KINDS, Kind
from schemas.units import Value
from schemas.upcasting import upcast
from services.mesh.bus import MSG_ID, Stored

_envelopes = msgspec.json.Decoder(Envelope)
_data = {name: msgspec.json.Decoder(kind.data) for name, kind in KINDS.items()}
_encoder = msgspec.json.Encoder(order="deterministic")


def encode_data(value: Any) -> bytes:
    """Canonical bytes of event data: equal values give equal bytes."""
    return _encoder.encode(value)


def encode(
    *, id: str, run: str, kind: str, entity: str, owner: str, instance: str, causation: int, data: Value
) -> bytes:
    """Bytes of an event. Raises BusError when `owner` may not say `kind` or the data is not the kind's."""
    known = KINDS.get(kind)
    if known is None or owner not in known.owners:
        raise BusError(f"{owner} may not say {kind}", where=id, remedy="schemas/kinds.py names the owners of each kind")
    if type(data) is not known.data:
        raise BusError(f"{kind} carries {known.data.__name__}, not {type(data).__name__}", where=id)
    return _encoder.encode(
        Envelope(
            id=id,
            run=run,
            kind=kind,
            entity=entity,
            owner=owner,
            instance=instance,
            causation=causation,
            v=known.v,
            # Encoded where it stands: the bytes are those of `encode_data`.
            data=cast(msgspec.Raw, data),
        )
    )


def headers(*, id: str, run: str, kind: str, entity: str, owner: str, time_us: int) -> dict[str, str]:
    """CloudEvents attributes in binary mode, for stock tools that subscribe."""
    known = KINDS[kind]
    return {
        "ce-specversion": "1.0",
        "ce-id": id,
        "ce-source": f"/qwengyre/{run}/{owner}",
        "ce-type": f"qwengyre.{kind}.v{known.v}",
        "ce-subject": entity,
        "ce-time": _iso(time_us),
        "ce-datacontenttype": "application/json",
    }


def stored(event: Event, *, run: str) -> Stored:
    """An event as it lies in LOG: `decode` of it is the event. Who publishes goes through the bus, which numbers and dates
    it; this is for logs that no bus made."""
    named = {"id": event.id, "run": run, "kind": event.kind, "entity": event.entity, "owner": event.owner}
    return Stored(
        seq=event.seq,
        time_us=event.time_us,
        subject=streams.subject(run, event.owner, event.kind, event.entity),
        headers={**headers(**named, time_us=event.time_us), MSG_ID: event.id},
        data=encode(**named, instance=event.instance, causation=event.causation, data=event.data),
    )


def _iso(time_us: int) -> str:
    """As `datetime.isoformat` writes a moment in UTC."""
    days, us = divmod(time_us, _DAY_US)
    seconds, us = divmod(us, 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    fraction = f".{us:06d}" if us else ""
    return f"{_date(days)}T{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}{fraction}+00:00"


_DAY_US = 86_400 * 1_000_000


@functools.lru_cache(maxsize=8)
def _date(days: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=days)).isoformat()


def decode(stored: Stored) -> Event:
    """The event in one stored message of LOG. The readers of one process share it, so nobody changes its data."""
    place = stored.seq % _KEPT
    known = _kept[place]
    if known is not None and (known[0] is stored or known[0] == stored):
        return known[1]
    try:
        envelope = _envelopes.decode(stored.data)
    except msgspec.DecodeError as error:
        raise LogBroken(f"not an envelope: {error}", where=f"sequence {stored.seq} ({stored.subject})") from None
    event = to_event(envelope, seq=stored.seq, time_us=stored.time_us)
    if len(stored.data) <= _KEPT_BYTES:
        _kept[place] = (stored, event)
    return event


_KEPT, _KEPT_BYTES = 2048, 16 * 1024
_kept: list[tuple[Stored, Event] | None] = [None] * _KEPT
"""By place in the log: several parts of a service read LOG side by side, and in a simulation all services do."""


def _known(kind: Kind) -> type[msgspec.Struct]:
    fields = [
        ("id", str),
        ("entity", str),
        ("owner", str),
        ("instance", str, ""),
        ("causation", int, 0),
        # An envelope that doesn't say its version has the first.
        ("v", Literal[kind.v], 1) if kind.v == 1 else ("v", Literal[kind.v]),
        ("data", kind.data),
    ]
    return msgspec.defstruct(f"Known_{kind.name}", fields, tag_field="kind", tag=kind.name, frozen=True, kw_only=True)


_KNOWN = {_known(kind): kind.name for kind in KINDS.values()}
KnownEnvelope: Any = Union[tuple(_KNOWN)]  # noqa: UP007  made of the table
"""Type of an envelope of a kind and version that this code knows, decoded with its data in one go. Whatever else there is
doesn't decode as one: `Envelope` and `to_event` take it."""


def known_event(envelope: Any, *, seq: int, time_us: int) -> Event:
    """The event of a KnownEnvelope."""
    return Event(
        seq=seq,
        time_us=time_us,
        kind=_KNOWN[type(envelope)],
        entity=envelope.entity,
        owner=envelope.owner,
        instance=envelope.instance,
        causation=envelope.causation,
        id=envelope.id,
        data=envelope.data,
    )


def to_event(envelope: Envelope, *, seq: int, time_us: int) -> Event:
    """The event of any envelope. Raises LogBroken when its data is not its kind's."""
    known = KINDS.get(envelope.kind)
    data: Any = envelope.data
    if known is not None and envelope.v <= known.v:
        try:
            if envelope.v == known.v:
                data = _data[envelope.kind].decode(envelope.data)
            else:
                was = msgspec.json.decode(envelope.data)
                data = msgspec.convert(upcast(envelope.kind, was, v=envelope.v, to=known.v), known.data)
        except (msgspec.DecodeError, KeyError) as error:
            raise LogBroken(f"{envelope.kind}: {error}", where=f"sequence {seq}") from None
    return Event(
        seq=seq,
        time_us=time_us,
        kind=envelope.kind,
        entity=envelope.entity,
        owner=envelope.owner,
        instance=envelope.instance,
        causation=envelope.causation,
        id=envelope.id,
        data=data,
    )
