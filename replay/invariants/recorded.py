"""Invariants over what lies beside LOG: RECORDS, what the harnesses lived, the projection, and the deciders themselves."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import call_id
from schemas.records import CallRecord, Closed, Delivery, GivenUp
from services.mesh.bus import Stored
from services.mesh.tree_codec import decode_record, digest_records

Attempt = tuple[str, int]
"""Execution and attempt."""


def attempt_of(stored: Stored) -> Attempt:
    """Whose entry a message of RECORDS is: `rec.{run}.{execution}.{attempt}.{call}`, where execution and call have a dot."""
    _, _, group, member, attempt, *_ = stored.subject.split(".")
    return f"{group}.{member}", int(attempt)


def request_of(record: CallRecord) -> str:
    """What the answers of its request are called towards the harness."""
    return f"msg_{record.request[:24]}"


class Seals(Invariant):
    """What is sealed is what RECORDS holds of the attempt, to the last byte, and nothing is added after it.

    Source: DESIGN section 6 (seals the execution: count and digest of its records)
    """

    name = "seals"

    def begin(self) -> None:
        self._entries: dict[Attempt, list[Stored]] = defaultdict(list)
        for stored in self.evidence.records or ():
            self._entries[attempt_of(stored)].append(stored)

    @on("execution.sealed")
    def sealed(self, event: Event) -> None:
        if self.evidence.records is None:
            return
        data: e.ExecutionSealed = event.data
        entries = list(self._entries.get((event.entity, data.attempt), ()))
        if entries and isinstance(decode_record(entries[-1].data), Closed):
            entries.pop()
        last = entries[-1].seq if entries else 0
        if (data.records, data.last_record) != (len(entries), last):
            said = f"{data.records} records up to {data.last_record}"
            self.violated(event, f"sealed {said}, RECORDS has {len(entries)} up to {last}")
        elif data.digest != digest_records(stored.data for stored in entries):
            self.violated(event, "the digest is not that of the entries")

    def end(self) -> None:
        if self.evidence.records is None:
            self.skip("RECORDS is not at hand")


class RecordsWhole(Invariant):
    """Calls of an attempt are recorded one after the other, numbered without a gap, parents before children, one record a
    request; log-probabilities and versions cover what was sampled; what is delivered was recorded; nothing follows what
    closed the attempt.

    Source: DESIGN section 6; section 'Black-box proxy' (token-in, token-out)
    """

    name = "records_whole"

    def end(self) -> None:
        if self.evidence.records is None:
            self.skip("RECORDS is not at hand")
            return
        entries = sorted(self.evidence.records, key=attempt_of)
        for (execution, attempt), stored in groupby(entries, key=attempt_of):
            self._attempt(execution, attempt, list(stored))

    def _attempt(self, execution: str, attempt: int, entries: list[Stored]) -> None:
        calls: set[str] = set()
        requests: set[str] = set()
        closed = False
        for stored in entries:
            entry = decode_record(stored.data)

            about = execution if isinstance(entry, Closed | GivenUp) else entry.call

            def wrong(what: str, seq: int = stored.seq, about: str = about) -> None:
                self.report(0, about, f"entry {seq} of RECORDS: {what}")

            if closed:
                wrong("stored after the attempt was closed")

            if (entry.execution, entry.attempt) != (execution, attempt):
                wrong(f"is of {entry.execution}, attempt {entry.attempt}")
            if isinstance(entry, Closed):
                closed = True
                continue
            if isinstance(entry, GivenUp):
                continue
            if isinstance(entry, Delivery):
                if entry.call not in calls:
                    wrong("delivered and never recorded")
                continue
            if (
                entry.call in calls
                or entry.call != call_id(execution, attempt, len(calls))
                or entry.index != len(calls)
            ):
                wrong(f"number {entry.index} after {len(calls)} calls")
            if entry.parent is not None and entry.parent not in calls:
                wrong(f"its parent {entry.parent} is not recorded")
            if entry.request in requests:
                wrong("a second record of the same request")
            ends = [0, *(span.end for span in entry.versions)]
            if [span.start for span in entry.versions] != ends[:-1] or ends[-1] != len(entry.output_ids):
                wrong(f"versions do not cover its {len(entry.output_ids)} tokens")
            if len(entry.logprobs) != len(entry.output_ids):
                wrong(f"{len(entry.logprobs)} log-probabilities of {len(entry.output_ids)} tokens")
            calls.add(entry.call)
            requests.add(entry.request)


class TreesRecorded(Invariant):
    """A frozen tree is the records of the attempt that finished, in counts: a node a call, its tokens, and as trainable what
    our engine sampled and the harness took.

    Source: DESIGN section 7 (provenance decides targets)
    """

    name = "trees_recorded"

    def begin(self) -> None:
        self._calls: dict[Attempt, list[CallRecord]] = defaultdict(list)
        self._taken: set[str] = set()
        for stored in self.evidence.records or ():
            entry = decode_record(stored.data)
            if isinstance(entry, CallRecord):
                self._calls[attempt_of(stored)].append(entry)
            if isinstance(entry, Delivery) or (isinstance(entry, CallRecord) and entry.delivered):
                self._taken.add(entry.call)

    @on("execution.tree-frozen")
    def frozen(self, event: Event) -> None:
        if self.evidence.records is None:
            return
        data: e.ExecutionTreeFrozen = event.data
        calls = self._calls.get((event.entity, data.attempt), [])
        index = {record.call: number for number, record in enumerate(calls)}
        parents = [-1 if record.parent is None else index.get(record.parent, -2) for record in calls]
        tokens = [len(record.input_ids) + len(record.output_ids) for record in calls]
        trainable = [len(record.output_ids) if record.call in self._taken else 0 for record in calls]
        if not data.blob:
            self.violated(event, "its records were not what was sealed")
        elif (data.parents, data.tokens, data.trainable) != (parents, tokens, trainable):
            self.violated(event, f"{len(data.parents)} nodes that are not its {len(calls)} records")

    def end(self) -> None:
        if self.evidence.records is None:
            self.skip("RECORDS is not at hand")


class CallsAnswered(Invariant):
    """Every call of a harness is answered, or its execution or its attempt has ended.

    Source: section 'Role transitions that keep the harness alive'; DESIGN section 6
    """

    name = "calls_answered"

    def begin(self) -> None:
        self._ended: set[Attempt] = set()

    @on("execution.finished", "execution.lost")
    def ended(self, event: Event) -> None:
        self._ended.add((event.entity, event.data.attempt))

    def end(self) -> None:
        if self.evidence.calls is None or not self.evidence.complete:
            self.skip("what the harnesses lived to the end is not at hand")
            return
        for call in self.evidence.calls:
            if not call.answered and (call.execution, call.attempt) not in self._ended:
                how = f"refused with {call.refused}" if call.refused else "left without an answer"
                self.report(0, call.execution, f"{call.request or 'a call'} of attempt {call.attempt} was {how}")


class GateHolds(Invariant):
    """A cell that has said that it is draining takes no call of an older epoch: a lagging proxy is harmless.

    Source: DESIGN section 5 (its adapter refuses calls that carry an older one)
    """

    name = "gate_holds"

    def begin(self) -> None:
        self._drains: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Cell to where it said that it drains, and the epoch."""

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        if event.data.phase == "draining":
            self._drains[event.entity].append((event.seq, event.data.epoch))

    def end(self) -> None:
        if self.evidence.served is None:
            self.skip("what the cells served is not at hand")
            return
        for call in self.evidence.served:
            for seq, epoch in self._drains[call.cell]:
                if seq <= call.log and call.epoch < epoch:
                    self.report(seq, call.cell, f"took a call of epoch {call.epoch} after it drained at {epoch}")
                    break


class AnswersRecorded(Invariant):
    """An answer reaches the harness only after its record is stored, and the same request gets the same answer.

    Source: DESIGN section 6
    """

    name = "answers_recorded"

    def end(self) -> None:
        calls, records = self.evidence.calls, self.evidence.records
        if calls is None or records is None:
            self.skip("what the harnesses lived, or RECORDS, is not at hand")
            return
        stored_at: dict[tuple[str, int, str], int] = {}
        for stored in records:
            entry = decode_record(stored.data)
            if isinstance(entry, CallRecord):
                stored_at.setdefault((entry.execution, entry.attempt, request_of(entry)), stored.seq)
        answers: dict[tuple[str, int, str], str] = {}
        for call in calls:
            if not call.answered:
                continue
            key = (call.execution, call.attempt, call.request)
            seq = stored_at.get(key)
            if seq is None:
                self.report(0, call.execution, f"{call.request} was answered and is not in RECORDS")
            elif seq > call.records:
                self.report(0, call.execution, f"{call.request} was answered before its record {seq} was stored")
            if answers.setdefault(key, call.answer) != call.answer:
                self.report(0, call.execution, f"{call.request} got two different answers")


class Projections(Invariant):
    """Rows are what LOG and RECORDS make them: a projection that is dropped and filled again is equal.

    Source: DESIGN section 7 (tables are projections)
    """

    name = "projections"

    def end(self) -> None:
        if self.evidence.tables is None or self.evidence.rebuilt is None:
            self.skip("no projection is at hand")
            return
        live, again = self.evidence.tables(), self.evidence.rebuilt()
        for table in sorted({*live, *again}):
            before, after = list(live.get(table, ())), list(again.get(table, ()))
            if before != after:
                differ = [str(row[:3]) for row in {*before} ^ {*after}]
                self.report(
                    0, table, f"{len(before)} rows, {len(after)} after a rebuild; they differ at {names(differ)}"
                )


class Replays(Invariant):
    """Every decision in the log is taken again, in its place and byte for byte, when the log is replayed.

    Source: DESIGN section 1 (replay computes again and compares)
    """

    name = "replays"

    def begin(self) -> None:
        self._events: list[Event] = []

    @on()
    def every(self, event: Event) -> None:
        self._events.append(event)

    def end(self) -> None:
        from replay.replayer import Replayer, load_deciders

        if not self._events or self._events[0].kind != "run.started":
            self.skip("the log does not begin with run.started")
            return
        for each in Replayer(deciders=load_deciders()).replay(self._events).deciders:
            if each.first is not None:
                more = f", and {each.divergences - 1} more" if each.divergences > 1 else ""
                self.report(each.first.recorded_seq or each.first.seq, each.decider, f"{each.first}{more}")
            if each.unrecorded and self.evidence.complete:
                self.report(0, each.decider, f"{each.unrecorded} decisions are missing at the log's end")
