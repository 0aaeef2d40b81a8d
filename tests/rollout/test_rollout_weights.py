"""A cell's weights: what is published is pulled once, in order, and before the cell serves; what nobody exposes is waited for."""

from __future__ import annotations

import pytest

from schemas import events as e
from schemas.errors import EngineError
from tests.rollout.stage import RUN, Stage, call, running


async def test_every_publication_is_pulled_once_and_a_repeated_exposure_is_not(stage: Stage) -> None:
    async with running(stage):
        await stage.seen("cell.joined")
        await stage.expose(2)
        await stage.seen("weights.published", version=2)
        await stage.expose(2, at="elsewhere")
        await stage.expose(4)
        await stage.seen("weights.published", version=4)
    assert stage.engine.done == ["start", "pull 2 there", "pull 4 there"]


async def test_a_restarted_cell_joins_with_the_current_weights(stage: Stage) -> None:
    await stage.expose(2, at="old")
    await stage.expose(2, at="new")
    async with running(stage):
        joined = await stage.seen("cell.joined")
    assert joined.data.version == 2
    assert stage.engine.done == ["start", "pull 2 new"]


async def test_a_restarted_cell_waits_until_the_published_weights_are_exposed_again(stage: Stage) -> None:
    """Whoever exposed them is gone: it serves nobody and does not end, and joins with the next exposure."""
    stage.engine.gone = {"old"}
    stage.engine.release.set()
    await stage.expose(2, at="old")
    async with running(stage):
        url = (await stage.seen("service.joined")).data.url
        await stage.engine.tried.wait()
        assert (await call(url, 0))[0] == 409
        await stage.expose(2, at="new")
        assert (await stage.seen("cell.joined")).data.version == 2
        assert (await call(url, 0))[0] == 200
    assert stage.engine.done == ["start", "pull 2 new", "generate"]


async def test_a_cell_that_returns_waits_for_an_exposure_that_can_be_pulled(stage: Stage) -> None:
    stage.engine.gone = {"old"}
    async with running(stage):
        await stage.seen("cell.joined")
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="released")
        await stage.expose(2, at="old")
        await stage.decide("rollout", epoch=2)
        await stage.decide("rollout", epoch=2, phase="released", owner="trainer")
        await stage.engine.tried.wait()
        await stage.expose(2, at="new")
        assert (await stage.seen("cell.role-transition", phase="acquired", source="train")).data.version == 2
    assert stage.engine.done == ["start", "release", "resume", "pull 2 new"]


async def test_what_is_published_while_a_cell_returns_is_pulled_before_it_says_so(stage: Stage) -> None:
    async with running(stage):
        await stage.seen("cell.joined")
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="released")
        await stage.expose(2)
        stage.engine.let.clear()
        await stage.decide("rollout", epoch=2)
        await stage.decide("rollout", epoch=2, phase="released", owner="trainer")
        await stage.engine.pulling.wait()
        await stage.cell._until_folded(await stage.expose(4))
        stage.engine.let.set()
        assert (await stage.seen("cell.role-transition", phase="acquired", source="train")).data.version == 4
    assert stage.engine.done == ["start", "release", "resume", "pull 2 there", "pull 4 there"]


async def test_an_exposure_that_was_out_of_reach_for_a_moment_is_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.service.PULL_AGAIN_S", 0.01)
    async with running(stage):
        await stage.seen("cell.joined")
        stage.engine.gone = {"there"}
        await stage.expose(2)
        await stage.engine.tried.wait()
        stage.engine.gone = set()
        await stage.seen("weights.published", version=2)
    assert stage.engine.done == ["start", "pull 2 there"]


async def test_weights_that_stay_out_of_reach_end_the_service(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.service.PULL_AGAIN_S", 0.01)
    monkeypatch.setattr("services.rollout.service.EXPOSED_S", 0.05)
    stage.engine.gone = {"old"}
    await stage.expose(2, at="old")
    async with running(stage) as task:
        with pytest.raises(EngineError, match="nobody is there"):
            await task


async def test_weights_that_nobody_exposes_after_the_run_end_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is finished while the cell waits for them: it waits no more, and lives on."""
    monkeypatch.setattr("services.rollout.service.EXPOSED_S", 0.0)
    monkeypatch.setattr("services.rollout.service.PULL_AGAIN_S", 60.0)
    stage.engine.gone = {"old"}
    await stage.expose(2, at="old")
    async with running(stage) as task:
        await stage.engine.tried.wait()
        seq = await stage.say("scheduler", "run.finished", RUN, e.RunFinished(steps=3, reason="steps_done"))
        await stage.cell._until_folded(seq)
        assert stage.context.health.ready() == ""
        assert not task.done()
    assert stage.engine.done == ["start"]


async def test_a_cell_that_starts_after_the_run_joins_and_starts_no_engine(stage: Stage) -> None:
    await stage.expose(2)
    await stage.say("scheduler", "run.finished", RUN, e.RunFinished(steps=3, reason="steps_done"))
    async with running(stage) as task:
        await stage.seen("service.joined")
        assert stage.context.health.ready() == ""
        assert not task.done()
    assert stage.engine.done == []


async def test_a_cell_that_cannot_pull_still_leaves_for_training(stage: Stage) -> None:
    stage.engine.gone = {"old"}
    await stage.expose(2, at="old")
    async with running(stage):
        await stage.engine.tried.wait()
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="released")
    assert stage.engine.done == ["start", "release"]
