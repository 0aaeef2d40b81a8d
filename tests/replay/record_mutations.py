"""What breaks the laws that need more than LOG: of records, calls, engines and tables, and of replay."""

from __future__ import annotations

from typing import Any

import msgspec

from replay.invariants import Evidence, Served
from schemas.records import Closed
from services.mesh.tree_codec import decode_record, encode_record
from tests.replay.mutations import Case, changed, find, of, raised, with_evidence


def other_records(**values: Any) -> Any:
    """The last record of RECORDS with fields changed."""

    def change(evidence: Evidence) -> Evidence:
        assert evidence.records is not None
        *rest, last = evidence.records
        data = encode_record(msgspec.structs.replace(decode_record(last.data), **values))
        return with_evidence(evidence, records=[*rest, msgspec.structs.replace(last, data=data)])

    return change


def closed_too_soon(evidence: Evidence) -> Evidence:
    """The last record's attempt was closed before it."""
    assert evidence.records is not None
    *rest, last = evidence.records
    record = decode_record(last.data)
    closed = encode_record(Closed(execution=record.execution, attempt=record.attempt))
    return with_evidence(evidence, records=[*rest, msgspec.structs.replace(last, data=closed), last])


def one_record_more(evidence: Evidence) -> Evidence:
    assert evidence.records is not None
    last = evidence.records[-1]
    return with_evidence(evidence, records=[*evidence.records, msgspec.structs.replace(last, seq=last.seq + 1)])


def other_call(**values: Any) -> Any:
    def change(evidence: Evidence) -> Evidence:
        assert evidence.calls is not None
        first, *rest = evidence.calls
        return with_evidence(evidence, calls=[first, *rest, msgspec.structs.replace(first, **values)])

    return change


MUTATIONS: dict[str, list[Case]] = {
    "seals": [
        (lambda log: changed(log, of("execution.sealed"), records=raised(1)), None, "RECORDS has"),
        (lambda log: changed(log, of("execution.sealed"), digest="x"), None, "the digest is not that"),
        (None, one_record_more, "RECORDS has"),
    ],
    "records_whole": [
        (None, one_record_more, "number"),
        (None, closed_too_soon, "stored after the attempt was closed"),
        (None, other_records(parent="c-0"), "its parent c-0 is not recorded"),
        (None, other_records(logprobs=[]), "log-probabilities"),
        (None, other_records(versions=[]), "versions do not cover"),
    ],
    "trees_recorded": [
        (None, other_records(input_ids=[1]), "that are not its"),
        (None, other_records(delivered=False), "that are not its"),
        (lambda log: changed(log, of("execution.tree-frozen"), blob=""), None, "not what was sealed"),
    ],
    "calls_answered": [
        (lambda log: log[: find(log, of("execution.finished"))], other_call(answered=False), "left without an answer"),
    ],
    "answers_recorded": [
        (None, other_call(records=0), "was answered before its record"),
        (None, other_call(request="msg_x"), "is not in RECORDS"),
        (None, other_call(answer="b"), "two different answers"),
    ],
    "gate_holds": [
        (
            None,
            lambda evidence: with_evidence(evidence, served=[Served(cell="cell-0", epoch=0, log=10**6)]),
            "took a call of epoch 0 after it drained at 1",
        ),
    ],
    "projections": [
        (None, lambda evidence: with_evidence(evidence, rebuilt=lambda: {"groups": []}), "0 after a rebuild"),
    ],
    "replays": [
        (lambda log: changed(log, of("execution.placed"), 7, reason=[]), None, "scheduler, decision"),
        (lambda log: log[: find(log, of("burst.ended"), -1)], None, "decisions are missing"),
    ],
}
