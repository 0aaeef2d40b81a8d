"""The net catches fish: a few planted bugs in a few seeds; `gyre bench fish` does all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.fault.planted import FOLDER, StalePatch, about, check_applies, first_caught, fish, patches, plant

ROOT = Path(__file__).parents[2]
PLANTED = patches(ROOT / FOLDER)
QUICK = {"13-checkpoint-after-step": "durable_before_published", "22-request-generated-twice": "records_whole"}
"""Such as the first seeds find, and the law that says so."""


def named(stem: str) -> Path:
    return next(patch for patch in PLANTED if patch.stem == stem)


def test_there_are_twenty_of_them_and_more() -> None:
    assert len(PLANTED) >= 20
    numbers = [patch.stem[:2] for patch in PLANTED]
    assert numbers == [f"{number:02d}" for number in range(1, len(PLANTED) + 1)]


@pytest.mark.parametrize("patch", PLANTED, ids=lambda patch: patch.stem)
def test_each_says_what_it_is_and_can_be_planted(patch: Path) -> None:
    check_applies(patch, ROOT)
    assert about(patch).count(".") >= 2
    changed = [line for line in patch.read_text().splitlines() if line.startswith("+++ ")]
    assert changed and all(line.startswith("+++ b/services/") for line in changed)


@pytest.mark.parametrize("stem", QUICK)
def test_the_net_catches_it(stem: str) -> None:
    catch = fish(named(stem), tree=ROOT, seeds=4)
    assert catch.found
    assert QUICK[stem] in catch.invariants
    assert catch.violation


def test_what_depends_on_the_order_of_a_set_is_caught_by_a_second_process() -> None:
    catch = fish(named("06-unordered-iteration"), tree=ROOT, seeds=3)
    assert catch.found
    assert "same-log" in catch.invariants or "replays" in catch.invariants


def test_nothing_is_caught_where_nothing_is_planted() -> None:
    assert first_caught(ROOT, ROOT, seeds=1) is None


def test_a_planted_bug_that_can_not_be_planted_any_more_is_named(tmp_path: Path) -> None:
    stale = tmp_path / "99-stale.patch"
    stale.write_text(named("09-epoch-not-raised").read_text().replace("epoch", "apoch"))
    with pytest.raises(StalePatch, match=r"99-stale\.patch: this planted bug doesn't apply any more") as failed:
        plant(stale, ROOT, tmp_path / "copy")
    assert "plant it anew" in failed.value.remedy
