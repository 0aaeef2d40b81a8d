"""One publish, seen through to a known outcome.

    attempt ── acknowledged ──────────────────────────> sequence
       │ ├──── no answer (unknown!) ── pause ── ours is the last of its subject ──> sequence
       │ │                                └─ another's ── attempt again, same Msg-Id
       │ └──── wrong last sequence ── read back ── ours is there ──> sequence
       └ deadline: BusError, unknown                └─ another's ──> SequenceConflict

Why reading back: a server with one replica checks the expected sequence before it looks for duplicates, so the second
attempt of a publish whose first answer was lost is refused by our own message. A message stored under an expected
sequence N is the first one under the filter after N, and those that followed it don't matter; the search goes on from
there so that it is found too when an earlier attempt was made with an older expectation.

Why looking before a second attempt: the server forgets ids by its wall clock. Where that jumps meanwhile, as on a machine
that slept, the same id would be stored twice.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from schemas.errors import BusError
from services.mesh import bus as face
from services.mesh.bus import SequenceConflict, Stored

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
SEARCH_LIMIT = 1000
"""Messages under the filter that are looked through for our own id before a refusal counts as a conflict."""


class Unanswered(Exception):
    """No answer, or one that says "not now": the message may be stored or not, or be stored later."""


class WrongSequence(Exception):
    """The stream refused the expected last sequence."""


class PublishPort(Protocol):
    """What a bus must offer for its publishes to be seen through."""

    async def attempt(self, stream: str, subject: str, data: bytes, headers: dict[str, str], timeout_s: float) -> int:
        """Publishes once and returns the sequence, the old one of a duplicate. Raises Unanswered, WrongSequence, or
        BusError when trying again is of no use."""

    async def next_for(self, stream: str, subject_filter: str, after: int) -> Stored | None: ...

    async def last_for(self, stream: str, subject_filter: str) -> Stored | None: ...


async def publish(
    port: PublishPort,
    stream: str,
    subject: str,
    data: bytes,
    *,
    msg_id: str,
    headers: dict[str, str],
    expect_last_subject: int | None,
    expect_filter: str | None,
    deadline_s: float,
    attempt_s: float,
) -> int:
    """Implements `Bus.publish` over a port; `attempt_s` bounds the wait for one answer."""
    face.check_subject(subject)
    if not msg_id or not msg_id.isprintable() or msg_id != msg_id.strip():
        raise BusError(f"{msg_id!r} cannot be a message id", where=subject, remedy="give each message an id of its own")
    scope = expect_filter or subject
    if scope != subject and not face.subject_matches(scope, subject):
        raise BusError(
            f"the expected sequence is over {scope}, which doesn't cover the message",
            where=subject,
            remedy="use a filter that matches the subject, else two claims of one thing could both be stored",
        )
    sent = {**headers, face.MSG_ID: msg_id, face.EXPECTED_STREAM: stream}
    if expect_last_subject is not None:
        sent[face.EXPECTED_LAST] = str(expect_last_subject)
        if scope != subject:
            sent[face.EXPECTED_LAST_FILTER] = scope
    elif expect_filter is not None:
        raise BusError("a filter without an expected sequence", where=subject, remedy="pass expect_last_subject too")

    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    pause = FIRST_PAUSE_S
    why, doubtful = "no answer", False
    while (left := deadline - loop.time()) > 0:
        try:
            if doubtful and expect_last_subject is None:
                seq = await _stored_before(port, stream, subject, msg_id, min(attempt_s, left))
                if seq is not None:
                    return seq
            # The port gets headers of its own: clients write into the dict that they are given.
            left = deadline - loop.time()
            return await port.attempt(stream, subject, data, dict(sent), max(0.0, min(attempt_s, left)))
        except Unanswered as error:
            why, doubtful = str(error) or why, True
        except WrongSequence as error:
            why = str(error) or why
            if expect_last_subject is None:
                raise BusError(f"a publish without expectation was refused: {why}", where=subject) from error
            seq = await _read_back(port, stream, subject, msg_id, scope, expect_last_subject)
            if seq is not None:
                return seq
        await asyncio.sleep(max(0.0, min(pause, deadline - loop.time())))
        pause = min(2 * pause, LONGEST_PAUSE_S)
    raise BusError(
        f"no acknowledgement within {deadline_s:g} s ({why}); the message {msg_id} may be stored, now or later",
        where=subject,
        remedy="check that the event bus is up, then publish again with the same id",
    )


async def _stored_before(port: PublishPort, stream: str, subject: str, msg_id: str, timeout_s: float) -> int | None:
    """The sequence of our message where an attempt without an answer has stored it. Raises Unanswered where that can't be
    told in time."""
    try:
        async with asyncio.timeout(timeout_s):
            last = await port.last_for(stream, subject)
    except TimeoutError:
        raise Unanswered from None
    return last.seq if last is not None and last.msg_id == msg_id else None


async def _read_back(
    port: PublishPort, stream: str, subject: str, msg_id: str, scope: str, expected: int
) -> int | None:
    """What a refused expectation means: our sequence, SequenceConflict, or None when nothing explains it yet (another
    publish under the same filter was in flight and may still fail)."""
    after = expected
    for _ in range(SEARCH_LIMIT):
        found = await port.next_for(stream, scope, after)
        if found is None:
            break
        if found.msg_id == msg_id:
            return found.seq
        after = found.seq
    last = await port.last_for(stream, scope)
    last_seq = last.seq if last is not None else 0
    if last_seq == expected:
        return None
    raise SequenceConflict(subject=subject, expect_filter=scope, expected=expected, last_seq=last_seq)
