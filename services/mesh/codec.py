"""Between events and the bytes that lie in LOG.

Decoding never fails on a kind or a field that this version does not know: such an event keeps its data raw, so that an
older subscriber skips it. Anything that is not an envelope is LogBroken.
"""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Any

import msgspec

from schemas.envelope import Envelope, Event
from schemas.errors import BusError, LogBroken
from schemas.kinds import KINDS
from schemas.units import Value
from services.mesh.bus import Stored

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
            data=msgspec.Raw(encode_data(data)),
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
        "ce-time": datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(),
        "ce-datacontenttype": "application/json",
    }


def decode(stored: Stored) -> Event:
    """The event in one stored message of LOG. The readers of one process share it, so nobody changes its data."""
    if len(stored.data) > _SHARED_BYTES:
        return _decode(stored.data, stored.seq, stored.time_us, stored.subject)
    return _shared(stored.data, stored.seq, stored.time_us, stored.subject)


def _decode(data: bytes, seq: int, time_us: int, subject: str) -> Event:
    try:
        envelope = _envelopes.decode(data)
    except msgspec.DecodeError as error:
        raise LogBroken(f"not an envelope: {error}", where=f"sequence {seq} ({subject})") from None
    return to_event(envelope, seq=seq, time_us=time_us)


_SHARED_BYTES = 16 * 1024
_shared = functools.lru_cache(maxsize=2048)(_decode)
"""Several parts of a service read LOG side by side, and in a simulation all services do."""


def to_event(envelope: Envelope, *, seq: int, time_us: int) -> Event:
    decoder = _data.get(envelope.kind)
    data: Any = envelope.data
    if decoder is not None and envelope.v == KINDS[envelope.kind].v:
        try:
            data = decoder.decode(envelope.data)
        except msgspec.ValidationError as error:
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
