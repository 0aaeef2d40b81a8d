"""A training cell whose gradients can be counted: for each micro-step, how many targets were added up.

    released <--release()/acquire()--> idle --begin_batch()--> batch --micro_step()*--> batch --step()--> idle

It has the face of `services.trainer.cell.Cell` and the same phases; what takes time returns an awaitable, for which
`Inline` waits. Weights are the digest of everything that was trained into them, so two cells with the same version and
another history are told apart. `wrong_steps` compares every step that LOG knows with what LOG says the batch holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from array import array
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from replay.worlds.disk import DAMAGED, Disk
from replay.worlds.world import CellScript, Flat, Step, World
from schemas import events as e
from schemas.envelope import Event
from schemas.errors import TrainerError
from schemas.micro_steps import MicroStep

START = "start"
"""Digest of the policy that every process begins with."""
Gradient = dict[str, int]


class Inline:
    """Implements `services.trainer.cell_process.Worker` without a thread."""

    async def __call__(self, act: Callable[[], Any]) -> Any:
        done = act()
        return await done if inspect.isawaitable(done) else done

    def close(self) -> None:
        """Nothing runs by itself."""


class Takes:
    """An awaitable that lasts; nothing happens where nobody waits for it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.sleep(self._seconds).__await__()


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """As `services.trainer.objective.ObjectiveStats`, what the service reads of it."""

    loss: float
    tokens: int
    targets: int
    masked: list[bool]
    gap_sum: float = 0.0
    gap_max: float = 0.0
    gap_count: int = 0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """As `services.trainer.cell.StepResult`."""

    version: int
    loss: float
    grad_norm: float
    lr: float
    micro_steps: int
    seconds: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """As `services.trainer.training_state.Manifest`."""

    version: int
    digest: str


class WorldCell:
    """The cell of one life of a trainer's process."""

    def __init__(self, world: World, cell: str, script: CellScript, disk: Disk) -> None:
        self.version = 0
        self._world, self._name, self._script, self._disk = world, cell, script, disk
        self._weights = START
        self._released = False
        self._gradient: Gradient | None = None
        self._losses: list[float] = []

    def __repr__(self) -> str:
        return f"<WorldCell {self._name} [{self.phase}, version {self.version}, {len(self._losses)} micro-steps]>"

    @property
    def phase(self) -> Literal["released", "idle", "batch"]:
        if self._released:
            return "released"
        return "idle" if self._gradient is None else "batch"

    def release(self) -> Takes:
        self._demand("idle", "released", doing="release training memory")
        self._released = True
        return Takes(self._script.memory_s)

    def acquire(self) -> Takes:
        self._released = False
        return Takes(self._script.memory_s)

    def begin_batch(self) -> None:
        self._demand("idle", doing="begin a batch")
        self._gradient, self._losses = {}, []

    async def micro_step(self, micro_step: MicroStep) -> Stats:
        self._demand("batch", doing="train a micro-step")
        await asyncio.sleep(self._script.micro_step_s)
        assert self._gradient is not None
        targets = micro_step.targets.count(1)
        name = micro_step.micro_step
        self._gradient[name] = self._gradient.get(name, 0) + targets
        loss = -sum(micro_step.advantages) / 16
        self._losses.append(loss)
        versions = array("i", micro_step.token_version)
        current = sum(1 for version in versions if version == self.version)
        return Stats(
            loss=loss,
            tokens=micro_step.token_count,
            targets=targets,
            masked=[False] * len(micro_step.executions),
            gap_count=current,
        )

    def gradients(self) -> Gradient:
        self._demand("batch", doing="copy its gradients")
        assert self._gradient is not None
        return dict(self._gradient)

    def set_gradients(self, gradients: Gradient) -> None:
        self._demand("batch", doing="take gradients")
        self._gradient = dict(gradients)

    def drop_batch(self) -> None:
        self._demand("batch", doing="drop the batch")
        self._gradient = None

    async def step(self) -> StepResult:
        self._demand("batch", doing="step")
        await asyncio.sleep(self._script.step_s)
        assert self._gradient is not None
        gradient, self._gradient = self._gradient, None
        base = self._weights
        said = msgspec.json.encode([base, self.version, gradient], order="sorted")
        self._weights = hashlib.blake2b(said, digest_size=8).hexdigest()
        self.version += 1
        step = Step(cell=self._name, version=self.version, gradient=gradient, base=base, digest=self._weights)
        self._world.steps.append(step)
        return StepResult(
            version=self.version,
            loss=sum(self._losses),
            grad_norm=float(sum(gradient.values())),
            lr=1e-6,
            micro_steps=len(self._losses),
            seconds=self._script.step_s,
        )

    def flat_weights(self) -> Flat:
        return Flat(self._weights, self.version)

    def load_flat(self, flat: Flat, *, version: int) -> None:
        self._demand("idle", "released", doing="take weights")
        if flat.version != version:
            self._world.violations.append(f"{self._name} took weights of version {flat.version} for {version}")
        self._weights, self.version = flat.digest, version

    async def save(self, folder: Path) -> Manifest:
        """Whole or not at all: a life that ends meanwhile leaves what was there. Raises TrainerError."""
        self._demand("idle", doing="save a checkpoint")
        manifest = Manifest(version=self.version, digest=self._weights)
        await asyncio.sleep(self._script.save_s)
        try:
            self._disk.make(folder)
            self._disk.write(folder, "manifest", manifest)
        except OSError as error:
            raise TrainerError(f"the checkpoint can't be written: {error}", where=str(folder)) from error
        return manifest

    def load(self, folder: Path) -> Manifest:
        """Raises TrainerError where it is absent or damaged; nothing has changed then."""
        self._demand("idle", doing="load a checkpoint")
        found = self._disk.read(folder, "manifest")
        if not isinstance(found, Manifest):
            what = "it isn't what was saved" if found is DAMAGED else "there is no checkpoint"
            raise TrainerError(what, where=str(folder), remedy="restore an earlier one")
        self._weights, self.version = found.digest, found.version
        return found

    def flaw(self, folder: Path, digest: str) -> str:
        """Why it can't be loaded; empty when it can."""
        found = self._disk.read(folder, "manifest")
        return "" if isinstance(found, Manifest) and found.digest == digest else "it is not what was saved"

    def discard(self, folder: Path) -> None:
        self._disk.remove(folder)

    def close(self) -> None:
        self._gradient = None

    def _demand(self, *phases: str, doing: str) -> None:
        if self.phase not in phases:
            raise TrainerError(f"a cell that is {self.phase} can't {doing}", where=self._name)


def swapped(written: Any) -> Any:
    """Fault: in place of a checkpoint, a whole one of the same version that something else was trained into."""
    return msgspec.structs.replace(written, digest="foreign") if isinstance(written, Manifest) else written


def wrong_steps(log: Iterable[Event], steps: Sequence[Step]) -> list[str]:
    """What is wrong with the optimizer steps that LOG knows: each must have been made on the weights that LOG says were
    saved of the version before, and have added up exactly the targets of its batch, each once. A step that LOG never heard
    of counts for nothing; and what is exposed was saved."""
    made: dict[tuple[int, str], Step] = {(step.version, step.digest): step for step in steps}
    targets: dict[str, Gradient] = defaultdict(dict)
    saved: dict[int, list[str]] = defaultdict(list, {0: [START]})
    wrong: list[str] = []
    for event in log:
        data = event.data
        if isinstance(data, e.MicroStepEnqueued):
            targets[data.batch][event.entity] = sum(row.targets for row in data.rows)
        elif isinstance(data, e.CheckpointSaved):
            saved[data.version].append(data.digest)
        elif isinstance(data, e.WeightsExposed):
            if data.address["digest"] not in saved[data.version]:
                wrong.append(f"{event.id}: exposed weights that were never saved as version {data.version}")
        elif isinstance(data, e.BatchStepped):
            step = made.get((data.version, saved[data.version][-1] if saved[data.version] else ""))
            if step is None:
                wrong.append(f"{event.entity}: nobody made the step to version {data.version} that was saved")
            elif [step.base] != saved[data.version - 1][-1:]:
                wrong.append(f"{event.entity}: made on other weights than were saved of version {data.version - 1}")
            elif step.gradient != targets[event.entity]:
                wrong.append(f"{event.entity}: added up {step.gradient}, the batch holds {targets[event.entity]}")
    return wrong
