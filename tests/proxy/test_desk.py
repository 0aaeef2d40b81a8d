"""The proxy's desk: what it keeps of executions that are over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from schemas import events as e
from schemas.ids import execution_id
from services.proxy import desk as module
from services.proxy.desk import Desk
from services.proxy.refusal import Refused
from services.proxy.routes import Routes
from tests.replay.recorded import event


async def test_of_those_that_are_over_the_newest_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OVER_KEPT", 3)
    monkeypatch.setattr(module, "PLACED_S", 0.0)
    shared: Any = SimpleNamespace(routes=Routes())
    desk = Desk(shared, lambda finished, sealed: pytest.fail("nothing is sealed here"))
    names = [execution_id(0, index) for index in range(5)]
    for seq, name in enumerate(names, start=1):
        sealed = e.ExecutionSealed(attempt=0, records=0, last_record=0, digest="")
        desk.apply(event(seq, "execution.sealed", name, sealed, owner="proxy"))
    assert "3 over" in repr(desk)
    for name in names[2:]:
        with pytest.raises(Refused, match="is over"):
            await desk.find(name, 0)
    with pytest.raises(Refused, match="not placed yet"):
        await desk.find(names[0], 0)
