"""What debugging prints for people: events, checks, the state as a few tables. In a pipe the same without colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replay.debugging.fields import line
from replay.debugging.moments import Moment
from replay.timeline.notes import duration, note, reasons
from schemas.envelope import Event
from schemas.units import Check
from services.cli.output import say, table

_STYLES = {"rollout": "blue", "training": "dark_orange", "leaving": "bold", "returning": "dim", "out": "magenta"}


def time_text(time_us: int, start_us: int) -> str:
    return f"+{duration((time_us - start_us) / 1e6)}"


def event_line(event: Event, start_us: int) -> str:
    words = note(event)
    return f"{event.seq}  {time_text(event.time_us, start_us)}  {event.kind} {event.entity}" + (
        f": {words}" if words else ""
    )


def check_line(check: Check) -> str:
    return f"{check.rule}: {check.left:g} {check.op} {check.right:g} {'holds' if check.holds else 'does not hold'}"


class Steps:
    """Decisions one after the other, each input before what was decided on it, and where the run stands when it changed."""

    def __init__(self) -> None:
        self._cause = 0
        self._stands = ""

    def __repr__(self) -> str:
        return f"<Steps [input {self._cause}]>"

    def say(self, moment: Moment) -> None:
        """A decision."""
        assert moment.cause is not None
        if moment.cause.seq != self._cause:
            self._cause = moment.cause.seq
            say(event_line(moment.cause, moment.start_us))
        say(f"  -> {event_line(moment.event, moment.start_us)}")
        for check in reasons(moment.event):
            say(f"       {check_line(check)}")
        if (stands := line(moment)) != self._stands:
            self._stands = stands
            say(f"       {stands}")


def say_state(moment: Moment, shown: dict[str, Any], decided: Sequence[Event], told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(event_line(moment.event, moment.start_us), style="bold"))
    if moment.cause is not None:
        console.print(Text(f"  decided on {event_line(moment.cause, moment.start_us)}"))
    for name, value in told.items():
        console.print(Text(f"  {name} = {_value(value)}", style="green"))
    console.print()
    for row in _rows(shown["fields"]):
        console.print(Text(row))
    console.print()
    for row, role in _cells(shown["fields"]):
        console.print(Text(row, style=_STYLES.get(role, "")))
    if decided:
        console.print()
        console.print(Text("decided next:" if moment.cause is not None else "decided on it:"))
        for each in decided[:_MOST]:
            console.print(Text(f"  {event_line(each, moment.start_us)}"))
        if len(decided) > _MOST:
            console.print(Text(f"  and {len(decided) - _MOST} more"))


_MOST = 12


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _rows(f: dict[str, Any]) -> list[str]:
    room = f["C_R"] if f["C_R"] is not None else 0
    rows = [
        ("ledger", f"d {f['d']}, p {f['p']}, f {f['f']}, a {f['a']}; w = d - f = {f['w']}, {f['queued']} queued"),
        ("capacity", f"C_R {room}; C_e {_value(f['C_e'])}, C_s {f['C_s']}, K {_value(f['K'])}"),
        ("version", f"{f['version']} in training, {f['published']} published" + _publishing(f)),
    ]
    burst, batch, groups, supply = f["burst"], f["batch"], f["groups"], f["supply"]
    if burst is not None:
        rows.append(("burst", f"{burst['index']}: {burst['done']} of {burst['steps']} steps made"))
    if batch is not None:
        closed = (
            f"of {batch['micro_steps']} micro-steps"
            if batch["micro_steps"] is not None
            else "micro-steps, more may come"
        )
        said = ", join closed" * bool(batch["join_closed"]) + ", stepped" * bool(batch["stepped"])
        rows.append(
            (
                "batch",
                f"{batch['id']}, step {batch['step']}: {batch['claimed']} groups claimed, {batch['done']} {closed}{said}",
            )
        )
    counts = ", ".join(f"{groups[name]} {name}" for name in ("dispatched", "ready", "claimed", "owed"))
    rows.append(("groups", counts))
    if supply["ready"] is not None:
        rows.append(("supply", f"{supply['ready']} ready, {supply['needed']:g} needed (rho_min B){_timer(supply)}"))
    held = f["held"]
    if held is not None:
        rows.append(("held back", f"{held['cell']} by {held['rule']}, as was said last"))
    rows.append(("next to train", f["next_cell"] or "none"))
    if f["measurement"] is not None:
        rows.append(("measurement", f"{f['measurement']['id']}, {f['measurement']['open']} executions open"))
    rows.extend(("run", name) for name in ("paused", "finished") if f[name])
    return [f"{name:<14} {text}" for name, text in rows]


def _publishing(f: dict[str, Any]) -> str:
    return f", {f['publishing']} on its way to the engines" if f["publishing"] is not None else ""


def _timer(supply: dict[str, Any]) -> str:
    if supply["held"]:
        return ", and has been for tau"
    if supply["timer"] is not None:
        return f"; timer {supply['timer']} is due in {duration(max(supply['due_s'], 0))}"
    return "; no timer is armed"


def _cells(f: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("cell", "role", "load", "epoch", "version", "")]
    for each in [*f["cells"], *f["pool"]]:
        trouble = ", ".join(
            filter(None, ["withdrawn" * each["withdrawn"], f"{each['lost']} lost" if each["lost"] else ""])
        )
        load = f"{each['load']}/{each['capacity']}"
        rows.append((each["name"], each["role"], load, str(each["epoch"]), str(each["version"]), trouble))
    return list(zip(table(rows), [row[1] for row in rows], strict=True))
