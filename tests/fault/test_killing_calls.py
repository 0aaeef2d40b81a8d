"""A prompt that kills every engine, in a whole mesh: it is given up, nobody else is, and the run goes on to its end."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from replay.fault import plan as p
from replay.fault.draw import draw
from replay.fault.run import simulate_plan
from replay.fault.setting import setting_of
from replay.worlds import engine as world
from services.proxy.calls import Flight
from services.proxy.executions import Execution
from services.proxy.suspects import KillsEngines
from services.proxy.tree import Node

DIES_S = 0.3


class Poison:
    """The prompt of the n-th call of a run: an engine dies soon after it has it."""

    def __init__(self, nth: int) -> None:
        self._left, self.prompt = nth, b""
        self.deaths = 0
        self.given_up: list[bytes] = []

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generate, give_up = world.WorldEngine.generate, Execution._give_up

        async def poisoned(engine: world.WorldEngine, body: bytes) -> tuple[int, bytes]:
            ids = msgspec.json.encode(msgspec.json.decode(body)["input_ids"])[1:-1]
            self._left -= 1
            if self._left == 0:
                self.prompt = ids
            if ids == self.prompt:
                asyncio.get_running_loop().call_later(DIES_S, self._kill, engine)
            return await generate(engine, body)

        async def seen(execution: Execution, flight: Flight, why: KillsEngines) -> Node | None:
            self.given_up.append(b",".join(flight.prompt.encoded_ids([])))
            return await give_up(execution, flight, why)

        monkeypatch.setattr(world.WorldEngine, "generate", poisoned)
        monkeypatch.setattr(Execution, "_give_up", seen)

    def _kill(self, engine: world.WorldEngine) -> None:
        if not engine._code.done():
            self.deaths += 1
            engine.die()


@pytest.mark.parametrize(("seed", "faults"), [(1010, False), (1022, False), (1036, True), (1054, False), (1067, True)])
def test_only_the_call_that_kills_is_given_up(monkeypatch: pytest.MonkeyPatch, seed: int, faults: bool) -> None:
    poison = Poison(30 + seed % 60)
    poison.plant(monkeypatch)
    outcome = simulate_plan(draw(seed, setting_of(seed)) if faults else p.Plan(seed=seed, faults=[]))
    assert not outcome.violations
    assert set(poison.given_up) <= {poison.prompt}, "neighbours and victims of other faults go on"
    if not faults:
        # Members of a group may have the same prompt, and come to engines before the first of them is given up.
        most = setting_of(seed).config.proxy.most_losses
        assert poison.given_up and poison.deaths <= most + (most - 1) * (len(poison.given_up) - 1)


def test_whoever_is_lost_by_faults_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that die of themselves, all of them, several times."""
    poison = Poison(0)
    poison.plant(monkeypatch)
    cells = Counter(name.partition("-")[2] for name in setting_of(1).instances() if name.startswith("rollout-"))
    faults = [
        p.EngineFault(pin=p.Pin(kind="execution.started", nth=nth), cell=cell, how="dies", seconds=1.0)
        for nth in range(2, 40, 3)
        for cell in cells
    ]
    outcome = simulate_plan(p.Plan(seed=1, faults=faults))
    assert not outcome.violations and not poison.given_up
    assert len(outcome.struck) >= 6
