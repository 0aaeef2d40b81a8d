"""`gyre fault`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from replay.fault import run as runs
from replay.fault.plan import Plan, read
from replay.fault.run import Outcome
from replay.invariants import Violation
from replay.logfile import read_manifest
from schemas.errors import ConfigError
from services.cli import fault_command as command

EXAMPLE = Path(__file__).parents[1] / "fault" / "plans" / "example.json"


def gyre_fault(tmp_path: Path, **given: object) -> int:
    usual = {"seed": None, "seeds": None, "first": 0, "plan": None, "output": None, "jobs": 1, "json": False}
    return command.fault_command(**{**usual, "plans": tmp_path / "plans", **given})  # type: ignore[arg-type]


def test_one_plan_says_what_struck_and_writes_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "log.gyre"
    assert gyre_fault(tmp_path, plan=EXAMPLE, output=output) == 0
    said = capsys.readouterr().out
    assert "crash service=scheduler steps=3 down_s=2 at execution.placed #12" in said
    assert "3 faults struck, 0 did not" in said
    assert "nothing was violated" in said
    assert read_manifest(output).messages > 300


def test_many_seeds_give_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre_fault(tmp_path, seeds=2, first=1, json=True) == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert (said["figures"]["seeds"], said["figures"]["violations"], said["ok"]) == (2, 0, True)
    assert said["figures"]["faults"] > 15
    assert said["figures"]["executions_per_seed"] > 35


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that doesn't bear a restart of the event bus."""
    whole = runs.simulate_plan

    def simulate_plan(plan: Plan) -> Outcome:
        outcome = whole(plan)
        if any(fault.name == "server-restart" for fault in plan.faults):
            violation = Violation(invariant="capacity", seq=7, entity="cell-0", what="too much")
            return msgspec.structs.replace(outcome, violations=[violation])
        return outcome

    monkeypatch.setattr(runs, "simulate_plan", simulate_plan)
    monkeypatch.setattr("replay.fault.shrink.simulate_plan", simulate_plan)
    monkeypatch.setattr("replay.fault.shrink.shrink.__kwdefaults__", {"run": simulate_plan, "runs": 60})


@pytest.mark.usefixtures("broken")
def test_a_seed_that_fails_is_shrunk_to_a_plan_that_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = next(seed for seed in range(50) if any(f.name == "server-restart" for f in drawn(seed).faults))
    assert gyre_fault(tmp_path, seed=seed) == 1
    said = capsys.readouterr().out
    (path,) = (tmp_path / "plans").iterdir()
    assert f"again: gyre fault --plan {path}" in said
    assert [fault.name for fault in read(path).faults] == ["server-restart"]
    assert gyre_fault(tmp_path, plan=path, json=True) == 1
    assert msgspec.json.decode(capsys.readouterr().out)["violations"][0]["invariant"] == "capacity"


def drawn(seed: int) -> Plan:
    from replay.fault.draw import draw
    from replay.fault.setting import setting_of

    return draw(seed, setting_of(seed))


def test_one_of_three_is_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing given"):
        gyre_fault(tmp_path)
    with pytest.raises(ConfigError, match="--seed and --plan given"):
        gyre_fault(tmp_path, seed=1, plan=EXAMPLE)
