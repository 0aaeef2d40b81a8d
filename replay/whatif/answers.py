"""The answers of a recorded run: what is recorded, and for the rest what is drawn from it (`Answers.told` counts both).

| part | recorded by | else |
| --- | --- | --- |
| executions | id and attempt | `replay.whatif.lives` |
| micro-steps | id, where it has the same rows and the same cell | least squares over tokens, times how slow the cell was |
| updates | training step | one of the recorded |
| phases of a cell | cell and epoch | one of the same phase, of a satellite or the core |
| publications | version | one of the recorded |

A cell that returns is ready after its own time; a satellite not before its weights are published, unless the recording shows
satellites that came back before.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from replay.simulator.answers import Said, micro_step_done
from replay.simulator.durations import Draw
from replay.whatif.lives import Lives
from replay.whatif.recording import Life, MicroStep, Passage, Recording
from schemas import events as e
from schemas import streams
from schemas.config import Config
from schemas.envelope import Event
from schemas.ids import cell_id, cell_index, pool_id

_SEALED = Said(0, e.ExecutionSealed(attempt=0, records=0, last_record=0, digest=""))
_FROZEN = Said(
    0, e.ExecutionTreeFrozen(attempt=0, blob="", digest="", parents=[], tokens=[], trainable=[], leaves=[], classes=[])
)


class Recorded:
    """`told`: part to id to how it was answered, `recorded` or another word."""

    load_effect = 0.0

    def __init__(self, recording: Recording, config: Config) -> None:
        self._recording, self._config = recording, config
        self.lives = Lives(recording)
        self.told: dict[str, dict[Any, str]] = {}
        self.gaps = {key: _median(found) for key, found in recording.gaps.items()}
        """Decider and kind to microseconds until a decision is stored."""
        self._rate = Rate([each for each in recording.micro_steps.values() if each.trained is not None])
        self._claim_us = _median([each.claim_us for each in recording.micro_steps.values() if each.cell])
        self._late_us = _median(recording.late.values())
        self._starts = _median([each.start_us for each in recording.lives.values() if each.start_us >= 0])
        self._passages: dict[tuple[bool, str, str], list[Passage]] = {}
        for (cell, _, phase), passage in recording.passages.items():
            self._passages.setdefault((cell != cell_id(0), passage.target, phase), []).append(passage)
        returns = self._passages.get((True, "rollout", "acquired"), [])
        self._waits = any(each.waited for each in returns) or not recording.returns_early
        own = [each for each in returns if not each.waited] or self._passages.get((False, "rollout", "acquired"), [])
        self._returns_us = [each.after_us for each in own] or [min((each.after_us for each in returns), default=0)]

    def __repr__(self) -> str:
        return f"<Recorded {self._recording!r}>"

    def _note(self, part: str, name: Any, how: str) -> None:
        self.told.setdefault(part, {})[name] = how

    def _one_of(self, found: Sequence[Any], *what: Any) -> Any:
        return random.Random(":".join(map(str, (self._recording.run, *what)))).choice(found)

    def joins(self) -> list[tuple[str, Said]]:
        cells, recorded = self._config.cells, self._recording.joins
        engines = [(cell_id(index), index, cells.capacity) for index in range(cells.count)]
        engines += [(pool_id(index), index, cells.pool_capacity) for index in range(cells.pool)]
        first = next(iter(recorded.values()), None)
        found: list[tuple[str, Said]] = []
        for name, index, capacity in engines:
            said = recorded.get(name)
            if said is not None:
                found.append((name, Said(said.after_us, msgspec.structs.replace(said.data, capacity=capacity))))
                continue
            last_us = max((each.after_us for each in recorded.values()), default=0)
            joined = e.CellJoined(
                index=index,
                capacity=capacity,
                url="",
                engine=first.data.engine if first else "",
                version=0,
                capabilities=first.data.capabilities if first else [],
            )
            found.append((name, Said(last_us, joined)))
        return found

    def started(self, placed: Event) -> Said:
        data: e.ExecutionPlaced = placed.data
        life = self._recording.lives.get((placed.entity, data.attempt))
        after_us = life.start_us if life is not None and life.start_us >= 0 else self._starts
        return Said(after_us, e.ExecutionStarted(attempt=data.attempt))

    def run(self, execution: str, attempt: int) -> Draw:
        lived = self.lives.of(execution, attempt)
        self._note("executions", execution, lived.how)
        assert lived.life.finished is not None
        return Draw(lived.ran_us / 1e6, lived.life.finished.reason, 0.0)

    def finished(self, execution: str, attempt: int, draw: Draw) -> e.ExecutionFinished:
        lived = self.lives.of(execution, attempt)
        finished = lived.life.finished
        assert finished is not None
        if lived.how == "recorded":
            return finished
        workspace = streams.workspace_blob(execution, attempt) if finished.workspace else ""
        return msgspec.structs.replace(finished, attempt=attempt, seconds=draw.seconds, workspace=workspace)

    def sealed(self, finished: Event) -> Said:
        data: e.ExecutionFinished = finished.data
        after_us, sealed = self._rest(finished.entity, data.attempt).sealed or _SEALED
        return Said(after_us, msgspec.structs.replace(sealed, attempt=data.attempt))

    def frozen(self, sealed: Event) -> Said:
        execution, attempt = sealed.entity, sealed.data.attempt
        after_us, frozen = self._rest(execution, attempt).frozen or _FROZEN
        blob = streams.tree_blob(execution, attempt)
        return Said(after_us, msgspec.structs.replace(frozen, attempt=attempt, blob=blob))

    def _rest(self, execution: str, attempt: int) -> Life:
        """Who tells what follows the end: the attempt itself, also when it was cut off there, else the life that it takes."""
        life = self._recording.lives.get((execution, attempt))
        if life is not None and life.sealed is not None and life.frozen is not None:
            return life
        return self.lives.of(execution, attempt).life

    def evaluation_claimed(self, requested: Event) -> Said:
        data: e.EvaluationRequested = requested.data
        claims = self.lives.of(data.execution, data.attempt).life.claims
        after_us = claims[min(data.tries, len(claims)) - 1] if claims else 0
        return Said(after_us, e.EvaluationClaimed(evaluator="evaluator"))

    def evaluated(self, evaluation: str, asked: e.EvaluationRequested) -> Said:
        verdicts = self.lives.of(asked.execution, asked.attempt).life.verdicts
        if not verdicts:
            failed = e.EvaluationFailed(
                execution=asked.execution, attempt=asked.attempt, reason="not recorded", tries=asked.tries
            )
            return Said(0, failed)
        after_us, data = verdicts[min(asked.tries, len(verdicts)) - 1]
        replace = msgspec.structs.replace
        if isinstance(data, e.EvaluationFailed):
            return Said(after_us, replace(data, execution=asked.execution, attempt=asked.attempt, tries=asked.tries))
        scored = replace(
            data,
            execution=asked.execution,
            attempt=asked.attempt,
            workspace_digest=asked.workspace_digest,
            reference=asked.workspace,
        )
        return Said(after_us, scored)

    def phase(self, event: Event, phase: str, publication_us: int) -> tuple[int, float]:
        cell, data = event.entity, event.data
        satellite = cell_index(cell) > 0
        known = self._recording.passages.get((cell, data.epoch, phase))
        if known is not None and known.target != data.target:
            known = None
        if (data.target, phase) == ("rollout", "acquired"):
            self._note("returns", (cell, data.epoch), "recorded" if known is not None and not known.waited else "drawn")
            if known is not None and not known.waited:
                after_us = known.after_us
            else:
                after_us = self._one_of(self._returns_us, cell, data.epoch)
            if satellite and self._waits:
                after_us = max(after_us, publication_us)
            same = known is not None and known.after_us == after_us
            return after_us, known.seconds if same and known is not None else after_us / 1e6
        if phase == "acquired":
            self._note("departures", (cell, data.epoch), "recorded" if known is not None else "drawn")
        if known is None:
            found = self._passages.get((satellite, data.target, phase)) or self._passages.get(
                (not satellite, data.target, phase)
            )
            if not found:
                return 0, 0.0
            known = self._one_of(found, cell, data.epoch, phase)
        return known.after_us, known.seconds

    def claimed(self, micro_step: str, cell: str) -> int:
        known = self._recording.micro_steps.get(micro_step)
        return known.claim_us if known is not None and known.cell == cell else self._claim_us

    def trained(self, micro_step: str, enqueued: e.MicroStepEnqueued, cell: str) -> Said:
        known = self._recording.micro_steps.get(micro_step)
        same = known is not None and known.enqueued.rows == enqueued.rows
        if known is not None and known.trained is not None and same and known.cell == cell:
            self._note("micro_steps", micro_step, "recorded")
            return known.trained
        self._note("micro_steps", micro_step, "by_tokens")
        after_us = self._rate.of(enqueued.tokens, cell)
        return Said(after_us, micro_step_done(enqueued, cell, after_us / 1e6))

    def stepped(self, proposed: e.BatchStepped) -> Said:
        replace = msgspec.structs.replace
        steps = self._recording.steps
        known = steps.get(proposed.step)
        self._note("steps", proposed.step, "recorded" if known is not None else "drawn")
        after_us, data = known or self._one_of(
            [steps[each] for each in sorted(steps)] or [Said(0, proposed)], "step", proposed.step
        )
        counted = (data.version, data.members, data.micro_steps, data.tokens, data.targets, data.executions)
        if known is not None and counted == (
            proposed.version,
            proposed.members,
            proposed.micro_steps,
            proposed.tokens,
            proposed.targets,
            proposed.executions,
        ):
            return Said(after_us, replace(data, as_of=proposed.as_of))
        return Said(after_us, replace(proposed, seconds=data.seconds))

    def exposed(self, version: int, purpose: str) -> int:
        found = self._recording.exposed
        if (version, purpose) in found:
            return found[version, purpose]
        return _median([after_us for (_, what), after_us in found.items() if what == purpose])

    def published(self, version: int) -> list[tuple[int, frozenset[str] | None, e.WeightsPublished]]:
        recorded, waited = self._recording.published, self._recording.publication_us
        known = recorded.get(version)
        self._note("publications", version, "recorded" if known is not None or version in waited else "drawn")
        if known is None and (version in waited or not recorded):
            # No engine served when it was published.
            after_us = waited.get(version, _median(waited.values()))
            data = e.WeightsPublished(version=version, bytes=0, seconds=after_us / 1e6, transport="")
            return [(after_us, None, data)]
        if known is None:
            known = recorded[self._one_of(sorted(recorded), "publication", version)]
        by_time: dict[int, set[str]] = {}
        for name, said in known.items():
            by_time.setdefault(said.after_us, set()).add(name)
        # Whoever was not served then takes as long as the last.
        last_us = max(by_time)
        told = {said.after_us: said.data for said in known.values()}
        cells = self._config.cells
        every = {cell_id(index) for index in range(cells.count)} | {pool_id(index) for index in range(cells.pool)}
        by_time[last_us] |= every - set(known)
        return [
            (after_us, frozenset(names), msgspec.structs.replace(told[after_us], version=version))
            for after_us, names in sorted(by_time.items())
        ]

    def late(self, timer: str) -> int:
        return self._recording.late.get(timer, self._late_us)


class Rate:
    """Microseconds of a micro-step: `a + b tokens` by least squares, neither below zero, times a factor for each cell."""

    def __init__(self, steps: Sequence[MicroStep]) -> None:
        pairs = [(each.enqueued.tokens, each.trained.after_us) for each in steps if each.trained is not None]
        self._fixed, self._slope = _line(pairs)
        took: dict[str, tuple[float, float]] = {}
        for each in steps:
            if each.trained is not None:
                real, modelled = took.get(each.cell, (0.0, 0.0))
                took[each.cell] = real + each.trained.after_us, modelled + self._at(each.enqueued.tokens)
        self._factors = {cell: real / modelled for cell, (real, modelled) in took.items() if modelled > 0}

    def __repr__(self) -> str:
        return f"<Rate {self._fixed / 1e6:.3g} s + {self._slope / 1e6:.3g} s a token>"

    def _at(self, tokens: int) -> float:
        return self._fixed + self._slope * tokens

    def of(self, tokens: int, cell: str) -> int:
        return round(self._at(tokens) * self._factors.get(cell, 1.0))


def _line(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    if not pairs:
        return 0.0, 0.0
    x, y = [float(each[0]) for each in pairs], [float(each[1]) for each in pairs]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    square = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / square if square else 0.0
    fixed = mean_y - slope * mean_x
    if square and slope >= 0 and fixed >= 0:
        return fixed, slope
    return (0.0, mean_y / mean_x) if mean_x and slope >= 0 else (mean_y, 0.0)


def _median(found: Any) -> int:
    values = list(found)
    return round(statistics.median(values)) if values else 0
