"""Plans are values: drawn alike, written and read, and smaller without some faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.fault import plan as p
from replay.fault.draw import FAULTS, draw
from replay.fault.draw import SNAPSHOT_EVERY as SNAPSHOTS
from replay.fault.setting import setting_of
from schemas.config_checks import validate
from schemas.errors import ConfigError
from schemas.kinds import KINDS
from services.mesh.service import SNAPSHOT_EVERY


def test_every_seed_has_a_run_that_the_product_takes() -> None:
    sizes = set()
    for seed in range(200):
        setting = setting_of(seed)
        validate(setting.config, where=f"seed {seed}")
        sizes.add(setting.executions)
    assert 36 <= min(sizes) <= max(sizes) <= 64


def test_a_seed_draws_the_same_plan_again_and_every_kind_of_fault_is_drawn() -> None:
    drawn = set()
    for seed in range(100):
        plan = draw(seed, setting_of(seed))
        assert plan == draw(seed, setting_of(seed))
        assert FAULTS[0] <= len(plan.faults) <= FAULTS[1]
        drawn |= {type(fault) for fault in plan.faults}
        assert all(fault.pin.kind in KINDS or not fault.pin.kind for fault in plan.faults)
    assert drawn == set(p.AnyFault.__args__)


def test_who_decides_writes_snapshots_often_or_as_in_production() -> None:
    drawn = [draw(seed, setting_of(seed)).snapshot_every for seed in range(50)]
    for service in ("scheduler", "trajectories", "packer"):
        assert {each[service] for each in drawn} == set(SNAPSHOTS)
    assert min(SNAPSHOTS) < 5 and max(SNAPSHOTS) == SNAPSHOT_EVERY


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = draw(7, setting_of(7))
    path = tmp_path / "plan.json"
    path.write_bytes(p.encode(plan))
    assert p.read(path) == plan
    assert all(str(fault) for fault in plan.faults)


def test_without_leaves_the_others() -> None:
    plan = draw(7, setting_of(7))
    assert plan.without({0, 2}).faults == [plan.faults[1], *plan.faults[3:]]


@pytest.mark.parametrize("content", [b"{", b'{"seed": 1, "faults": [{"fault": "flood"}]}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="no plan"):
        p.read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        p.read(tmp_path / "absent.json")
