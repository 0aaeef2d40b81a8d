"""Invariants of checkpoints and weights: durable first, then seen."""

from __future__ import annotations

from replay.invariants.base import Invariant, on
from schemas import events as e
from schemas.envelope import Event


class DurableBeforePublished(Invariant):
    """A version is durable before anybody hears of it: its checkpoint is saved before the step that makes it is said, before
    it is exposed, and before an engine serves it. A core that starts again goes on from a version that was stepped, none
    older than was exposed for engines: what is lost never left the training cells.

    Source: DESIGN section 4 (weights are published only when their checkpoint is durable), section 9
    """

    name = "durable_before_published"

    def begin(self) -> None:
        self._saved: set[int] = set()
        self._looked = 0
        self._stepped = self._exposed = 0

    @on("checkpoint.saved")
    def saved(self, event: Event) -> None:
        self._saved.add(event.data.version)
        if event.data.log_sequence >= event.seq:
            self.violated(event, f"covers the log up to {event.data.log_sequence}")

    @on("batch.stepped", "weights.exposed", "weights.published")
    def heard(self, event: Event) -> None:
        self._looked += 1
        version: int = event.data.version
        if version > 0 and version not in self._saved:
            self.violated(event, f"version {version} is not durable")
        if event.kind == "batch.stepped" and not self.scene.undone(event.entity):
            self._stepped = version
        elif event.kind == "weights.exposed" and event.data.purpose == "publish":
            self._exposed = max(self._exposed, version)

    @on("checkpoint.restored")
    def restored(self, event: Event) -> None:
        version: int = event.data.version
        if not self._exposed <= version <= self._stepped:
            self.violated(event, f"version {version} restored; {self._exposed} was exposed, {self._stepped} stepped")
        self._saved = {each for each in self._saved if each <= version}
        self._stepped = version

    def end(self) -> None:
        if not self._looked:
            self.skip("no step was made and no weights were published")


class WeightsInOrder(Invariant):
    """The core exposes what it has trained: a version that was stepped, for engines only after a burst's last step; an
    engine serves no version before it is exposed for that, and never an older one than before.

    Source: section 'Streaming training with dynamic membership' (publishes after the final step); DESIGN section 9
    """

    name = "weights_in_order"

    def begin(self) -> None:
        self._stepped: set[int] = {0}
        self._final: set[int] = {0}
        self._exposed: set[int] = {0}
        self._serves: dict[str, int] = {}

    @on("batch.stepped")
    def stepped(self, event: Event) -> None:
        self._stepped.add(event.data.version)
        batch = self.scene.batches.get(event.entity)
        if batch is not None and batch.opened.final:
            self._final.add(event.data.version)

    @on("checkpoint.restored")
    def restored(self, event: Event) -> None:
        for known in (self._stepped, self._final):
            known.difference_update([version for version in known if version > event.data.version])

    @on("weights.exposed")
    def exposed(self, event: Event) -> None:
        data: e.WeightsExposed = event.data
        if data.version not in self._stepped:
            self.violated(event, f"version {data.version} is exposed and was never stepped")
        if data.purpose == "publish":
            if data.version not in self._final:
                self.violated(event, f"version {data.version} is no burst's last")
            self._exposed.add(data.version)

    @on("weights.published", "cell.joined", "cell.role-transition")
    def served(self, event: Event) -> None:
        if event.kind == "cell.role-transition" and (event.data.phase, event.data.target) != ("acquired", "rollout"):
            return
        cell = self.scene.cells.get(event.entity)
        if event.kind == "cell.joined" and cell is not None and not cell.serves:
            # An engine that starts while its cell leaves or trains serves nobody before it has acquired.
            return
        version: int = event.data.version
        if version not in self._exposed:
            self.violated(event, f"serves version {version}, which was not exposed for engines")
        if version < self._serves.get(event.entity, 0):
            self.violated(event, f"serves version {version} after {self._serves[event.entity]}")
        self._serves[event.entity] = version
