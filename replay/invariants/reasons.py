"""The invariant of reasons: what decisions say of why they were taken."""

from __future__ import annotations

from replay.invariants.base import Invariant, on
from schemas.envelope import Event


class Reasons(Invariant):
    """Every decision carries the inequalities that allowed it, both sides as they stood: they are true as they are said,
    and their numbers are the ledger's. What keeps the next cell from training is said once, when another check fails first.

    Source: DESIGN section 4 (every decision carries its reason as data)
    """

    name = "reasons"
    order = "scheduler"

    def begin(self) -> None:
        self._held = ("", "")

    @on("cell.held")
    def held(self, event: Event) -> None:
        failing = next((each.rule for each in event.data.reason if not each.holds), "")
        if not failing:
            self.violated(event, "held, and every check holds")
        if (event.entity, failing) == self._held:
            self.violated(event, f"held by {failing}, as was said before")
        self._held = (event.entity, failing)
        for each in event.data.reason:
            sides = self._sides(event, each.rule)
            if sides is not None and (each.left, each.right) != sides:
                self.violated(event, f"{each.rule}: {each.left:g} and {each.right:g}, the log says {sides}")

    @on("execution.placed", "cell.role-transition", "burst.ended")
    def said(self, event: Event) -> None:
        if event.kind == "cell.role-transition" and event.data.phase == "decided":
            self._held = ("", "")
        back = event.kind == "cell.role-transition" and (event.data.target == "rollout" or event.data.phase == "failed")
        for each in event.data.reason:
            op = {"<=": each.left <= each.right, ">=": each.left >= each.right, "<": each.left < each.right}
            op |= {">": each.left > each.right, "==": each.left == each.right}
            if op[each.op] != each.holds:
                self.violated(event, f"{each.rule}: {each.left:g} {each.op} {each.right:g} is said to be {each.holds}")
            if event.kind != "burst.ended" and not back and not each.holds:
                self.violated(event, f"{each.rule} does not hold")
            # A cell that returns carries what stood when its burst ended.
            sides = None if back else self._sides(event, each.rule)
            if sides is not None and (each.left, each.right) != sides:
                self.violated(
                    event, f"{each.rule}: {each.left:g} and {each.right:g}, the log says {sides[0]:g} and {sides[1]:g}"
                )

    def _sides(self, event: Event, rule: str) -> tuple[float, float] | None:
        scene, config = self.scene, self.scene.rules
        s, C_e = config.scheduler, config.cells.capacity
        match rule:
            case "capacity (1)":
                return (scene.held, scene.served_capacity())
            # Those that leave together share the check of the first.
            case "waterlevel (2)" | "held-out executions fit" if s.strategy == "colocate":
                return None
            case "waterlevel (2)":
                return (scene.d - scene.f, scene.served_capacity() - C_e)
            case "held-out executions fit":
                return (scene.d - scene.f + scene.held_out, scene.served_capacity() - C_e)
            case "supply rho_min B":
                return (scene.supply(), s.rho_min * s.B)
            case "engine has room" | "its slot is held":
                cell = scene.cells.get(event.data.cell)
                return (cell.load, cell.capacity) if cell else (-1, -1)
        return None
