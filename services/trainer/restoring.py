"""What a core that starts again goes on from, and how it says so.

    newest version that was stepped --damaged--> the one before ... --> the version published last --damaged--> error

Normally that is the version stepped last, and nothing follows. Where its checkpoint is missing or damaged, the batches
that made what is lost are undone everywhere (`checkpoint.restored`): their groups are trained again. Invariants: the
core never goes behind the version that was exposed for publication, so what is lost never left the training cells; the
fact is stored only while nothing that a trainer said is unknown to who says it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas import events as e
from schemas.errors import TrainerError
from services.trainer.cell_process import CellProcess

if TYPE_CHECKING:
    from services.trainer.cell import Cell
    from services.trainer.weights_exchange import Flat


class Restoring:
    """`load(cell)` in the cell's thread before the service joins, `tell(cell)` once it has."""

    def __init__(self, process: CellProcess) -> None:
        self._process = process
        self._stepped = 0
        """Version after the last step in LOG when the choice was made."""

    def load(self, cell: Cell) -> Flat | None:
        """Puts the newest version that is whole into the cell. Returns the weights of the version published last
        where that is an older one: engines may still ask for them.

        Raises TrainerError where not even the published version can be loaded."""
        context, view = self._process.context, self._process.view
        self._stepped = view.stepped
        chosen, flaws = self._choose(cell)
        overtaken = None
        if 0 < view.exposed < chosen:
            what = self._flaw(cell, view.exposed)
            if what:
                context.log.warning("engines that start again must wait: the published version is damaged", what=what)
            else:
                self._put(cell, view.exposed)
                overtaken = cell.flat_weights()
        if chosen:
            self._put(cell, chosen)
        for version, what in flaws:
            context.log.warning("a checkpoint cannot be used", version=version, what=what, instead=chosen)
        return overtaken

    async def tell(self, cell: Cell) -> None:
        """Says which version the core goes on from, in a run in which one was stepped.

        Raises TrainerError where LOG has moved on since the choice: a process that is gone was heard late."""
        process, view, context = self._process, self._process.view, self._process.context

        def check() -> None:
            if view.stepped != self._stepped or view.exposed > cell.version:
                raise TrainerError(
                    f"version {view.stepped} was made meanwhile, by a process that has ended",
                    where=context.instance,
                    remedy="its supervisor starts it again, from there",
                )

        # What the process before it said is stored before its own first word, or refused.
        await process.until_folded(context.joined)
        check()
        if not self._stepped:
            return
        await process.say_next(
            "checkpoint.restored",
            f"v{cell.version:06d}",
            e.CheckpointRestored(version=cell.version, log_sequence=view.steps.get(cell.version, 0)),
            id=f"{context.run}.{context.cell}.restored.{view.processes[context.cell]}",
            check=check,
        )

    def _choose(self, cell: Cell) -> tuple[int, list[tuple[int, str]]]:
        """The version to go on from, and what is wrong with those above it."""
        view, flaws = self._process.view, list[tuple[int, str]]()
        for version in range(view.stepped, view.exposed - 1, -1):
            what = self._flaw(cell, version)
            if not what:
                return version, flaws
            flaws.append((version, what))
        said = "; ".join(f"version {version}: {what}" for version, what in flaws)
        raise TrainerError(
            f"no checkpoint from version {view.stepped} down to the published {view.exposed} can be loaded ({said})",
            where=str(self._process.context.folder / "checkpoints"),
            remedy="put a copy of one of them back there, or begin another run with --new: engines have served the "
            "published version, so this run cannot go on from an older one",
        )

    def _flaw(self, cell: Cell, version: int) -> str:
        """Why a version cannot be loaded. The starting policy always can: the cell was built from it."""
        if version == 0:
            return ""
        saved = self._process.view.checkpoints.get(version)
        if saved is None:
            return "the log names no checkpoint of it"
        return cell.flaw(self._process.context.folder / saved.path, saved.digest)

    def _put(self, cell: Cell, version: int) -> None:
        cell.load(self._process.context.folder / self._process.view.checkpoints[version].path)
