"""The frozen tree of one attempt, made from what lies in RECORDS between its first call and its seal.

Provenance: a node's trainable tokens are what our engine sampled for it, and only if the harness took the answer; its
new input is context. Invariants: nodes are in the order in which they were stored, so a parent's index is below its
child's; a call stored twice is one node; the same entries give the same tree.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas import streams
from schemas.errors import LogBroken
from schemas.events import ExecutionSealed, ExecutionTreeFrozen
from schemas.records import ROLES, CallRecord, Closed, Delivery, FrozenTree, GivenUp, RecordEntry, TreeNode
from services.mesh.bus import Bus
from services.mesh.tree_codec import decode_record, digest_records

_REMEDY = "the execution is excluded from training; look at the proxy that stored its records"


async def read_sealed(bus: Bus, run: str, execution: str, sealed: ExecutionSealed) -> FrozenTree:
    """The tree of the sealed attempt. Raises LogBroken when the records aren't what was sealed, or make no tree."""
    where = f"execution {execution}, attempt {sealed.attempt}"
    records = streams.records_stream(run)
    under = streams.records_filter(run, execution, sealed.attempt)
    stored = [entry.data async for entry in bus.read_range(records, 0, sealed.last_record, subject_filter=under)]
    if len(stored) != sealed.records:
        raise LogBroken(f"{len(stored)} records, but {sealed.records} were sealed", where=where, remedy=_REMEDY)
    digest = digest_records(stored)
    if digest != sealed.digest:
        raise LogBroken(f"records have digest {digest}, sealed was {sealed.digest}", where=where, remedy=_REMEDY)
    try:
        entries = [decode_record(data) for data in stored]
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise LogBroken(f"a record cannot be decoded: {error}", where=where, remedy=_REMEDY) from error
    return freeze(execution, sealed.attempt, entries)


def freeze(execution: str, attempt: int, entries: Iterable[RecordEntry]) -> FrozenTree:
    """The tree of the entries, in stream order. Raises LogBroken that names the call and what is wrong with it."""
    calls: dict[str, CallRecord] = {}
    index: dict[str, int] = {}
    taken: set[str] = set()
    for entry in entries:
        if isinstance(entry, Closed | GivenUp):
            continue
        if (entry.execution, entry.attempt) != (execution, attempt):
            raise _wrong(entry.call, execution, f"it belongs to {entry.execution}, attempt {entry.attempt}")
        match entry:
            case Delivery():
                if entry.call not in calls:
                    raise _wrong(entry.call, execution, "delivered before it was stored")
                taken.add(entry.call)
            case CallRecord() if entry.call not in calls:
                _check(entry, calls)
                index[entry.call] = len(calls)
                calls[entry.call] = entry
    nodes = [
        TreeNode(
            call=record.call,
            parent=-1 if record.parent is None else index[record.parent],
            input_ids=record.input_ids,
            output_ids=record.output_ids,
            logprobs=record.logprobs,
            versions=record.versions,
            temperature=record.temperature,
            role=record.role,
            trainable=record.delivered or record.call in taken,
        )
        for record in calls.values()
    ]
    return FrozenTree(execution=execution, attempt=attempt, nodes=nodes)


def leaves_of(tree: FrozenTree) -> list[int]:
    """Ends of the candidate trajectories: nodes that the harness took and after which it took no other.

    An answer that nobody took is no candidate, and so isn't the context at the end of one.
    """
    continued = [False] * len(tree.nodes)
    taken = [node.trainable for node in tree.nodes]
    for i in range(len(tree.nodes) - 1, -1, -1):
        parent = tree.nodes[i].parent
        if parent >= 0 and (taken[i] or continued[i]):
            continued[parent] = True
    return [i for i in range(len(tree.nodes)) if taken[i] and not continued[i]]


def counts_of(tree: FrozenTree, *, blob: str, digest: str) -> ExecutionTreeFrozen:
    """The tree in counts, without text: what outcome and admission decide on. `digest` is the blob's."""
    leaves = leaves_of(tree)
    return ExecutionTreeFrozen(
        attempt=tree.attempt,
        blob=blob,
        digest=digest,
        parents=[node.parent for node in tree.nodes],
        tokens=[len(node.input_ids) + len(node.output_ids) for node in tree.nodes],
        trainable=[len(node.output_ids) if node.trainable else 0 for node in tree.nodes],
        leaves=leaves,
        classes=[ROLES.index(tree.nodes[leaf].role) for leaf in leaves],
    )


def no_tree(attempt: int) -> ExecutionTreeFrozen:
    """What is said when the records aren't what was sealed: no blob. The outcome decider excludes the execution."""
    return ExecutionTreeFrozen(
        attempt=attempt, blob="", digest="", parents=[], tokens=[], trainable=[], leaves=[], classes=[]
    )


def _check(record: CallRecord, known: dict[str, CallRecord]) -> None:
    length = len(record.output_ids)
    if record.parent is None and not record.input_ids:
        raise _wrong(record.call, record.execution, "a root without input: nothing would predict its first token")
    if record.parent is not None and record.parent not in known:
        raise _wrong(record.call, record.execution, f"its parent {record.parent} wasn't stored before it")
    if len(record.logprobs) != length:
        raise _wrong(record.call, record.execution, f"{len(record.logprobs)} log-probabilities for {length} output ids")
    end = 0
    for span in record.versions:
        if span.start != end or span.end < span.start:
            raise _wrong(record.call, record.execution, f"versions jump from {end} to {span.start}..{span.end}")
        end = span.end
    if end != length:
        raise _wrong(record.call, record.execution, f"versions cover {end} of {length} output ids")


def _wrong(call: str, execution: str, what: str) -> LogBroken:
    return LogBroken(what, where=f"execution {execution}, call {call}", remedy=_REMEDY)
