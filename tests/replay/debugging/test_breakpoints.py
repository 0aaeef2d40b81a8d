"""Conditions over the state: what they mean, and what is refused, with words that help."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.debugging.breakpoints import LONGEST, Condition
from replay.debugging.fields import CELL_FIELDS, FIELDS
from replay.debugging.moments import Moment, Walk
from schemas.envelope import Event
from schemas.errors import ConfigError
from tests.replay.recorded import recorded


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return recorded(seed=1)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("w <= 4", lambda m: m.state.d - m.state.f <= 4),
        ("w <= C_R - C_e", lambda m: m.state.config is not None and _level(m)),
        ("2 <= w < 6 and not finished", lambda m: 2 <= m.state.d - m.state.f < 6 and not m.state.finished),
        ("d * 2 > p + f and -w > -5", lambda m: m.state.d * 2 > m.state.p + m.state.f and m.state.d - m.state.f < 5),
        (
            "cells[0].role == training",
            lambda m: "cell-0" in m.state.cells and m.state.cells["cell-0"].place == "training",
        ),
        (
            "kind == 'batch.stepped' and batch.step == 2",
            lambda m: m.event.kind == "batch.stepped" and m.state.batch.step == 2,
        ),
        ("batch.step != 1", lambda m: m.state.batch is not None and m.state.batch.step != 1),
        ("supply.held == true", lambda m: m.state.supply_held),
        ("(paused or (supply.held))", lambda m: m.state.paused or m.state.supply_held),
        ("cells[99].load >= 0 or pool[0].load >= 0", lambda m: False),
    ],
)
def test_a_condition_holds_where_it_says(events: list[Event], text: str, means: Callable[[Moment], bool]) -> None:
    condition, held = Condition(text), set()
    for moment in Walk(events):
        assert condition(moment) is bool(means(moment)), moment.event
        held.add(condition(moment))
    assert held == ({False} if "99" in text else {False, True})


def _level(moment: Moment) -> bool:
    able = moment.state.index.able
    return moment.state.d - moment.state.f <= (able - 1) * moment.state.rules.cells.capacity


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("w =< 12", "it cannot be read", "write it as in"),
        ("w = 12", "it cannot be read", "write"),
        ("", "it is empty", "w <= 12"),
        ("w", "it is a value and no condition", "compare it"),
        ("waterlevel <= 12", "no field is called waterlevel", "there are seq, time_s"),
        ("batch.stp == 1", "no field is called batch.stp", "did you mean batch.step?"),
        ("cells[2].rolle == training", "no field is called cells[2].rolle", "did you mean cells[2].role?"),
        ("cells.role == training", "no field is called cells.role", "cells[I]"),
        ("cells[w].load > 1", "a cell is named by its number", "cells[2].role"),
        ("cells[-1].load > 1", "a cell is named by its number", "cells[2].role"),
        ("cells[True].load > 1", "a cell is named by its number", "cells[2].role"),
        ("w <= '12'", "compares a number with a word", "put words in quotes"),
        ("cells[2].role == trains", "no field is called trains", "there are"),
        ("kind < 'b'", "orders what has no order", "use == or !="),
        ("w in 3", "it compares in a way that is unknown", "<="),
        ("w and d", "w is a number, and a yes or no is needed", "compare it"),
        ("paused + 1 > 2", "paused is a yes or no, and a number is needed", "use a number"),
        ("+w > 2", "+w is nothing", "use not, or a minus"),
        ("w / 2 > 3", "w / 2 is nothing that a condition may hold", "+ - *"),
        ("2 ** 999999999 > w", "is nothing that a condition may hold", "+ - *"),
        ("__import__('os').system('true') == 0", "nothing that a condition may hold", "names of fields"),
        ("w.__class__ == 1", "no field is called w.__class__", "there are"),
        ("(lambda: w)() > 1", "nothing that a condition may hold", "names of fields"),
        ("[w for w in d] == 1", "nothing that a condition may hold", "names of fields"),
        ("w == 1j", "is no number and no word", "use numbers"),
        ("w == None", "is no number and no word", "use numbers"),
        ("w <= 12; d", "it cannot be read", "write it as in"),
        (f"w <= {'1' * LONGEST}", "it is longer than", "make it shorter"),
        ("(" * 240 + "w" + ")" * 240 + ">1", "it cannot be read", "write it as in"),
        ("w <= 1if d else 2", "it cannot be read", "write it as in"),
        ("kind == '\\d'", "it cannot be read", "write it as in"),
        ("w <= \0", "it cannot be read", "write it as in"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Condition(text)
    assert what in refused.value.what and remedy in refused.value.remedy and "--until" in refused.value.where
    assert refused.value.exit_code == 2


def test_an_unknown_name_is_answered_with_all_that_there_are() -> None:
    with pytest.raises(ConfigError) as refused:
        Condition("x > 1")
    assert all(name in refused.value.remedy for name in [*FIELDS, *CELL_FIELDS])


def test_the_fields_of_a_condition_are_told(events: list[Event]) -> None:
    condition = Condition("w <= 4 and cells[0].load == 0 and w > cells[7].load")
    moment = next(iter(Walk(events)))
    assert condition.told(moment) == {"w": 0, "cells[0].load": None, "cells[7].load": None}


@given(st.text(alphabet="wdf.[]()<>=!+-*/ 0123456789andornotcells'\"{}:,@\\\n", max_size=60))
def test_whatever_is_written_it_is_a_condition_or_refused(text: str) -> None:
    try:
        Condition(text)
    except ConfigError:
        pass
