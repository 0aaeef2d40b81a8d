"""A cell's own way back, and its waiting for weights, are told apart."""

from __future__ import annotations

from replay.simulator.answers import Said
from replay.whatif.returns import Return, waits_of
from schemas.events import WeightsPublished


def back(cell: int, after_s: float, since_s: float, *, version: int = 3) -> Return:
    return Return(
        key=(f"cell-{cell}", 2, "acquired"),
        satellite=cell > 0,
        version=version,
        after_us=round(after_s * 1e6),
        since_us=round(since_s * 1e6),
    )


def said(seconds: float) -> dict[str, Said]:
    data = WeightsPublished(version=3, bytes=0, seconds=seconds, transport="")
    return {"pool-0": Said(round(seconds * 1e6), data)}


def test_who_is_back_with_the_publication_has_waited() -> None:
    found = waits_of([back(0, 3, 3), back(2, 60, 60), back(1, 3, 70)], {3: said(60)})
    assert found.waited == [("cell-2", 2, "acquired")] and not found.early


def test_who_is_back_at_the_same_moment_has_waited_for_what_nobody_published() -> None:
    found = waits_of([back(0, 3, 3), back(1, 60, 60), back(2, 60, 60)], {})
    assert sorted(found.waited) == [("cell-1", 2, "acquired"), ("cell-2", 2, "acquired")]
    assert found.publication_us == {3: 60_000_000} and not found.early


def test_the_first_that_takes_much_longer_than_those_after_it_has_waited() -> None:
    found = waits_of([back(3, 60, 60), back(2, 3, 63), back(1, 3, 66), back(0, 3, 69)], {})
    assert found.waited == [("cell-3", 2, "acquired")]
    assert found.publication_us == {3: 60_000_000} and not found.early


def test_satellites_that_come_back_before_anything_is_published_wait_for_nothing() -> None:
    """As reference engines do: each takes the weights on its way."""
    found = waits_of([back(2, 0.5, 2.0), back(1, 1.2, 3.3), back(0, 2.5, 6.0)], {})
    assert found.waited == [] and found.early
    assert waits_of([back(2, 0.5, 2.0)], {3: said(5)}).early
    assert not waits_of([back(2, 0.5, 7.0)], {3: said(5)}).early
