"""What one micro-step takes from its window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.packer.core.filling import by_size, fill
from services.packer.core.state import Bundle


def bundle(name: str, tokens: int) -> Bundle:
    return Bundle(execution=name, tokens=tokens, rows=[])


def test_the_oldest_group_goes_first_and_the_next_fills_up() -> None:
    old = by_size([bundle("a", 30), bundle("b", 50)])
    new = by_size([bundle("c", 45), bundle("d", 20), bundle("e", 10)])
    assert [chosen.execution for chosen in fill([old, new], 100)] == ["b", "a", "d"]


def test_a_bundle_above_the_bound_comes_alone() -> None:
    assert [chosen.execution for chosen in fill([[bundle("a", 101), bundle("b", 1)]], 100)] == ["a"]


groups = st.lists(st.lists(st.integers(1, 120), min_size=1, max_size=8), min_size=1, max_size=3)


@given(groups)
def test_it_holds_the_bound_and_leaves_nothing_that_fits(sizes: list[list[int]]) -> None:
    window = [by_size([bundle(f"{g}.{i}", tokens) for i, tokens in enumerate(group)]) for g, group in enumerate(sizes)]
    chosen = fill(window, 100)
    total = sum(one.tokens for one in chosen)
    assert chosen[0] is window[0][0]
    assert len({one.execution for one in chosen}) == len(chosen)
    assert total <= 100 or len(chosen) == 1
    rest = [one for group in window for one in group if one not in chosen]
    assert total > 100 or all(one.tokens > 100 - total for one in rest)
