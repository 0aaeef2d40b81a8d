"""What the harness keeps of executions: as much as is open, however long the run is."""

from __future__ import annotations

from schemas import events as e
from schemas.ids import execution_id, group_id, proxies_for, proxy_ids
from services.harness.book import Book
from tests.replay.recorded import event


def kept(book: Book) -> int:
    """Entries of all its maps."""
    return sum(len(value) for value in vars(book).values() if isinstance(value, dict))


def test_what_is_settled_is_forgotten() -> None:
    book = Book([])
    nothing = kept(book)
    seq = 0
    for group in range(50):
        name = execution_id(group, 0)
        lost, finished = e.ExecutionLost(attempt=0, reason="test"), e.ExecutionFinished
        for owner, kind, data in (
            ("scheduler", "dispatched", e.ExecutionDispatched(group=group_id(group), member=0, task="t")),
            ("scheduler", "placed", e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0)),
            ("harness", "started", e.ExecutionStarted(attempt=0)),
            ("harness", "lost", lost),
            ("scheduler", "placed", e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=1)),
            ("harness", "started", e.ExecutionStarted(attempt=1)),
            (
                "harness",
                "finished",
                finished(attempt=1, reason="completed", exit_code=0, seconds=1.0, workspace="w", workspace_digest="d"),
            ),
        ):
            seq += 1
            book.apply(event(seq, f"execution.{kind}", name, data, owner=owner))
            assert kept(book) > nothing
        seq += 1
        settled = e.ExecutionSettled(attempt=1, outcome="valid", reward=1.0, evaluation="v", reason="completed")
        book.apply(event(seq, "execution.settled", name, settled, owner="trajectories"))
        assert kept(book) == nothing
    assert book.due() == book.open() == book.unplaced() == []


def test_what_is_cancelled_comes_out_once_and_is_forgotten_with_its_outcome() -> None:
    """Queued, placed, and lost; a placement that comes late starts nothing."""
    book = Book([])
    book.apply(event(1, "service.joined", "proxy", e.ServiceJoined(url="u", pid=1), owner="proxy"))
    nothing = kept(book)
    queued, placed, lost = names = [execution_id(0, member) for member in range(3)]
    seq = 1
    for name in names:
        seq += 1
        book.apply(event(seq, "execution.dispatched", name, e.ExecutionDispatched(group=group_id(0), member=0, task="t")))
    for name in (placed, lost):
        seq += 1
        book.apply(event(seq, "execution.placed", name, e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0)))
    book.apply(event(seq + 1, "execution.lost", lost, e.ExecutionLost(attempt=0, reason="test"), owner="harness"))
    cancelled = e.ExecutionCancelled(reason="surplus", checks=[])
    for name in names:
        seq += 2
        book.apply(event(seq, "execution.cancelled", name, cancelled, owner="trajectories"))
    assert [(each.execution, each.attempt) for each in book.superfluous()] == [(queued, 0), (placed, 0), (lost, 1)]
    assert book.superfluous() == [] == book.due()
    for name, attempt in ((queued, 0), (lost, 1)):
        late = e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=attempt)
        book.apply(event(seq + 1, "execution.placed", name, late))
    assert book.due() == book.superfluous() == []
    settled = e.ExecutionSettled(attempt=0, outcome="excluded", reward=0.0, reason="surplus")
    for name in names:
        book.apply(event(seq + 2, "execution.settled", name, settled, owner="trajectories"))
    assert kept(book) == nothing


def test_an_execution_starts_when_its_own_proxy_has_joined() -> None:
    book = Book([], proxies=3)
    names = [execution_id(0, member) for member in range(12)]
    for seq, name in enumerate(names, start=1):
        book.apply(event(seq, "execution.dispatched", name, e.ExecutionDispatched(group=group_id(0), member=0, task="t")))
        book.apply(event(seq, "execution.placed", name, e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0)))
    assert book.due() == []
    begun = set()
    for proxy in proxy_ids(3):
        book.apply(event(100, "service.joined", proxy, e.ServiceJoined(url=f"at {proxy}", pid=1), owner="proxy"))
        due = {attempt.execution for attempt in book.due()}
        assert due == {name for name in names if proxies_for(name, 3)[0] == proxy} and due
        assert {book.proxy_of(name) for name in due} == {f"at {proxy}"}
        begun |= due
    assert begun == set(names)
