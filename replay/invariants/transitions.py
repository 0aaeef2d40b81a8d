"""Invariants of role transitions: one at a time, a prefix, phases in order, and the inequalities that allow them."""

from __future__ import annotations

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import cell_index


class TransitionsSerial(Invariant):
    """One cell changes its role at a time; with `colocate` several do, all of them into the same role.

    Source: section 'Boundary dispatch and waterlevel control' (cells transition serially)
    """

    name = "transitions_serial"
    order = "scheduler"

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        moving = self.scene.moving()
        # A failed one may be a cell that trained: it is put out of the prefix and was not on the way.
        place = "leaving" if data.target == "train" else "returning"
        same = all(self.scene.cells[name].place == place for name in moving)
        if data.phase == "decided" and moving and not (same and self.scene.strategy == "colocate"):
            self.violated(event, f"decided while {names(moving)} is in transition")
        elif data.phase == "completed" and event.entity not in moving:
            self.violated(event, f"completed, but {names(moving) or 'no cell'} is in transition")


class TrainingPrefix(Invariant):
    """Cells that train are a prefix, the core first, satellites by index; it grows, and is kept for the burst: after the
    burst's end those return that were not said to stay, the highest index first. Only the core may stay with `elastic`,
    nobody with `colocate`; with `async` all stay but those at or above a withdrawn one. When one is lost
    the prefix shrinks to below it: those above are put out as well, the core never is.

    Source: section 'Boundary dispatch and waterlevel control'; section 'Streaming training with dynamic membership'
    """

    name = "training_prefix"
    order = "scheduler"

    def begin(self) -> None:
        self._recalled: set[str] = set()
        self._put_out: list[str] = []
        """Cells that were put out on the input in hand."""

    @on("burst.ended")
    def ended(self, event: Event) -> None:
        training, staying = self.scene.training(), event.data.stays
        self._recalled = set(training) - set(staying)
        if staying != training[: len(staying)]:
            self.violated(event, f"{names(staying)} stay, no prefix of {names(training)}")
        cells, strategy = self.scene.cells, self.scene.strategy
        withdrawn = [cells[name].index for name in training if cells[name].withdrawn]
        most = {"elastic": 1, "colocate": 0}.get(strategy, min([len(training), *withdrawn]))
        if len(staying) > most or (strategy == "async" and len(staying) < most):
            self.violated(event, f"{len(staying)} cells stay, {most} may with {strategy}")

    def decided(self, event: Event) -> None:
        """After every loss: what trains is a prefix again."""
        if self._put_out:
            training = self.scene.training()
            if training != [f"cell-{index}" for index in range(len(training))]:
                self.violated(event, f"{names(self._put_out)} put out, and {names(training)} train: no prefix")
            self._put_out = []

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        scene, cell = self.scene, self.scene.cells.get(event.entity)
        if data.phase == "failed" and cell is not None:
            self._recalled.discard(event.entity)
            self._put_out.append(event.entity)
            above = any(other.lost and not other.pool and other.index <= cell.index for other in scene.cells.values())
            if not above or (cell.index == 0 and cell.place == "training"):
                self.violated(event, "put out, and no cell at or below it is lost")
        if (
            data.phase == "completed"
            and data.target == "train"
            and cell is not None
            and cell.index != len(scene.training())
        ):
            self.violated(event, f"trains, and {names(scene.training()) or 'no cell'} does: no prefix")
        if data.phase != "decided" or cell is None:
            return
        training = scene.training()
        if data.target == "train":
            training += sorted(
                (name for name in scene.moving() if scene.cells[name].place == "leaving"), key=cell_index
            )
        if cell.place == "out":
            if data.target != "rollout" or cell.lost:
                self.violated(event, f"was put out, and goes to {data.target} while {cell.lost or 'nothing'} is lost")
            return
        if data.target == "rollout":
            if not training or event.entity != training[-1]:
                self.violated(event, f"returns before {training[-1] if training else 'it trained'}")
            if event.entity not in self._recalled:
                self.violated(event, "returns before the burst's end")
            self._recalled.discard(event.entity)
            return
        if training != [f"cell-{index}" for index in range(cell.index)]:
            self.violated(event, f"joins while {names(training) or 'no cell'} trains: no prefix")
        if cell.index >= scene.trainers:
            self.violated(event, f"may not train: {scene.trainers} cells may")
        if cell.lost:
            self.violated(event, f"its {cell.lost} process is lost")
        if cell.withdrawn:
            self.violated(event, "is withdrawn")
        if self._recalled:
            self.violated(event, f"joins before {names(self._recalled)} returned")
        if scene.burst is None or scene.burst_done >= scene.burst.steps:
            self.violated(event, "joins outside of a burst")


_PHASES = {
    "train": [
        ("decided", "scheduler"),
        ("draining", "rollout"),
        ("drained", "rollout"),
        ("released", "rollout"),
        ("acquired", "trainer"),
        ("completed", "scheduler"),
    ],
    "rollout": [("decided", "scheduler"), ("released", "trainer"), ("acquired", "rollout"), ("completed", "scheduler")],
}


class TransitionPhases(Invariant):
    """A transition goes through its phases in their order, each said once by its owner: decided, draining, drained and
    released by the engine, acquired by the trainer, completed; back: decided, released by the trainer, acquired by the
    engine with the version published last, completed. Of a version that is published while it comes back it may hear later:
    `routes_to_serving` says that it serves nobody before.

    Source: DESIGN section 5; section 'Role transitions that keep the harness alive'
    """

    name = "transition_phases"

    def begin(self) -> None:
        self._at: dict[str, tuple[str, int, int]] = {}
        """Cell to the target, the epoch and the number of phases said."""
        self._published: dict[str, int] = {}
        """Cell to the version that was published last when its transition was decided."""

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        target, epoch, said = self._at.get(event.entity, (data.target, data.epoch, 0))
        if data.phase == "decided":
            whole = len(_PHASES[target])
            if 0 < said < whole:
                self.violated(event, f"decided again after phase {_PHASES[target][said - 1][0]} of epoch {epoch}")
            self._at[event.entity] = (data.target, data.epoch, 1)
            self._published[event.entity] = self.scene.published
            return
        if data.phase == "failed":
            self._at.pop(event.entity, None)
            return
        cell = self.scene.cells.get(event.entity)
        if cell is not None and data.epoch == cell.failed_epoch:
            return
        if (data.target, data.epoch) != (target, epoch):
            self.violated(event, f"{data.phase} of epoch {data.epoch} to {data.target}, it is at {epoch} to {target}")
            return
        expected = _PHASES[target][said] if 0 < said < len(_PHASES[target]) else ("decided", "scheduler")
        if (data.phase, event.owner) != expected:
            self.violated(event, f"{data.phase} by {event.owner}, expected {expected[0]} by {expected[1]}")
        published = self._published.get(event.entity, 0)
        if data.phase == "acquired" and target == "rollout" and data.version < published:
            self.violated(event, f"acquired version {data.version}, published is {published}")
        self._at[event.entity] = (target, epoch, said + 1)


class Epochs(Invariant):
    """A cell's epoch rises by one with every decided transition, and by nothing else; what is said of a cell in the
    meantime names the epoch that it has.

    Source: DESIGN section 5 (its epoch rises; its adapter refuses calls that carry an older one)
    """

    name = "epochs"

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        cell = self.scene.cells.get(event.entity)
        if cell is None:
            return
        expected = cell.epoch + (data.phase == "decided")
        if data.epoch != expected and data.epoch != cell.failed_epoch:
            self.violated(event, f"{data.phase} at epoch {data.epoch}, expected {expected}")


class WaterlevelGate(Invariant):
    """A cell joins training only while w <= C_R - C_e: what is outstanding still fits without it, held-out executions too,
    and so do its routes; with `colocate` without all that join. With `async` a cell that trains never served anybody.

    Source: equation (2)
    """

    name = "waterlevel_gate"
    order = "scheduler"

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        scene, cell = self.scene, self.scene.cells.get(event.entity)
        if cell is None or data.phase != "decided" or data.target != "train":
            return
        if scene.strategy == "async":
            if cell.load or not cell.reserved:
                self.violated(
                    event, f"{cell.load} executions on it, and the split {'has' if cell.reserved else 'lacks'} it"
                )
            return
        w, room = scene.d - scene.f, scene.served_capacity() - cell.capacity
        if w > room:
            self.violated(event, f"w = {w}, C_R - C_e = {room}")
        elif scene.held_out and w + scene.held_out > room:
            self.violated(event, f"w = {w} and {scene.held_out} held-out executions, C_R - C_e = {room}")
        free = sum(other.capacity - other.load for other in scene.serving() if other is not cell)
        if cell.load > free:
            self.violated(event, f"{cell.load} executions on it, {free} places elsewhere")


class SupplyGate(Invariant):
    """A cell joins training only when ready and unclaimed groups, capped by what the batch still needs, stayed at or above
    rho_min B for tau: the timer that was set when they were has fired, and they were ever since. It begins anew after
    every transition and at every batch's start. Those that leave together have one timer; a fixed split needs none.

    Source: section 'Boundary dispatch and waterlevel control' (rho_min, tau)
    """

    name = "supply_gate"
    order = "scheduler"

    def begin(self) -> None:
        self._timer = ""
        self._held = False
        self._allowed = 0
        """The input on which somebody left, with `colocate`: others leave on it too."""

    @on()
    def every(self, event: Event) -> None:
        scene = self.scene
        if scene.config is None:
            return
        s = scene.config.scheduler
        if (self._timer or self._held) and scene.supply() < s.rho_min * s.B:
            self._timer, self._held = "", False
        match event.kind:
            case "timer.set" if event.data.purpose == "supply":
                self._timer, self._held = event.entity, False
                if event.data.due_us != scene.now_us + round(s.tau_s * 1e6):
                    self.violated(event, f"due at {event.data.due_us}, tau after {scene.now_us} is another time")
            case "timer.fired" if event.entity == self._timer:
                self._timer, self._held = "", True
            case "batch.opened":
                self._timer, self._held = "", False
            case "checkpoint.restored" if event.data.version < scene.version:
                self._timer, self._held = "", False
            case "cell.role-transition" if event.data.phase in ("decided", "completed", "failed"):
                joins = event.data.phase == "decided" and event.data.target == "train"
                together = scene.strategy == "colocate" and event.causation == self._allowed
                if joins and scene.strategy == "colocate" and self._held:
                    self._allowed = event.causation
                if joins and not self._held and not together and scene.strategy != "async":
                    least = s.rho_min * s.B
                    self.violated(event, f"{scene.supply():g} groups ready, {least:g} did not hold for tau")
                self._timer, self._held = "", False


class CoreRetention(Invariant):
    """After a burst the core stays in training only if rho_min B groups are ready and w + mu N B <= C_s + (K - 1) C_e, N being
    what a group is dispatched with, and then it does; after the last burst it returns. With `colocate` it always returns, with
    `async` it never does.

    Source: equation (3)
    """

    name = "core_retention"
    order = "scheduler"

    @on("burst.ended")
    def ended(self, event: Event) -> None:
        scene, config = self.scene, self.scene.rules
        s, data = config.scheduler, event.data
        needed, room = scene.retention()
        supplied = scene.supply() >= s.rho_min * s.B
        last = scene.burst is not None and scene.burst.first_step + scene.burst.steps > config.steps
        stays = supplied and needed <= room and not last
        if s.strategy != "elastic":
            stays = s.strategy == "async" and "cell-0" in scene.training()
        if data.core_stays != stays:
            said = "stays" if data.core_stays else "returns"
            self.violated(
                event,
                f"the core {said}: {scene.supply():g} groups ready, "
                f"w + mu N B = {needed}, room {room}",
            )
