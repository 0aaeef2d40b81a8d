"""What the harness keeps of executions: as much as is open, however long the run is."""

from __future__ import annotations

from schemas import events as e
from schemas.ids import execution_id, group_id
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
