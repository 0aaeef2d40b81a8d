"""What a person sees while a run goes on: a live panel in a terminal, a line a step elsewhere, nothing when asked."""

from __future__ import annotations

import sys
import time
from typing import IO, TYPE_CHECKING, Protocol

from schemas.ids import in_pool
from services.cli.progress import CellView, Measured, Progress, Step

if TYPE_CHECKING:
    from rich.panel import Panel

BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40
_BUSY_S = 10.0
"""A file gets such a line this often."""


class View(Protocol):
    """Told of everything; draws when it likes."""

    def update(self, progress: Progress) -> None: ...

    def note(self, text: str) -> None:
        """Something that happens to the processes, not in the log."""

    def busy(self, text: str) -> None:
        """How far something is that takes its time; only the last one matters."""

    def memory(self, rss_bytes: int) -> None: ...

    def close(self) -> None: ...


class SilentView:
    def update(self, progress: Progress) -> None:
        """Draws nothing."""

    def note(self, text: str) -> None:
        """Draws nothing."""

    def busy(self, text: str) -> None:
        """Draws nothing."""

    def memory(self, rss_bytes: int) -> None:
        """Draws nothing."""

    def close(self) -> None:
        """Has nothing to end."""


class PlainView:
    """One line a step, for a file or a pipe."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._shown = self._measured = 0
        self._named = False
        self._busy_at = time.monotonic()

    def update(self, progress: Progress) -> None:
        if progress.run and not self._named:
            self._named = True
            # Steps that an earlier mesh of the run made were shown then.
            self._shown = len(progress.steps)
            self._say(f"run {progress.run}" + (f", {self._shown} steps are made" if self._shown else ""))
        # Steps that are undone are told again when they are made again.
        self._shown = min(self._shown, len(progress.steps))
        for step in progress.steps[self._shown :]:
            self._say(step_line(step, progress))
        self._shown = len(progress.steps)
        for measured in progress.measured[self._measured :]:
            self._say(measured_line(measured))
        self._measured = len(progress.measured)

    def note(self, text: str) -> None:
        self._say(text)

    def busy(self, text: str) -> None:
        if time.monotonic() - self._busy_at > _BUSY_S:
            self._busy_at = time.monotonic()
            self._say(text)

    def memory(self, rss_bytes: int) -> None:
        """Not worth a line."""

    def close(self) -> None:
        """Nothing is open."""

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class LiveView:
    """A panel that is redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = Progress()
        self._steps = 0
        self._note = ""
        self._rss = 0
        self._began = time.monotonic()
        # Draws once when it is made.
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False, get_renderable=self._draw)
        self._live.start()

    def update(self, progress: Progress) -> None:
        # A step that was trained since says more than what was going on before it.
        if len(progress.steps) > self._steps:
            self._steps = len(progress.steps)
            self._note = ""
        self._progress = progress

    def note(self, text: str) -> None:
        self._note = text

    def busy(self, text: str) -> None:
        self._note = text

    def memory(self, rss_bytes: int) -> None:
        self._rss = rss_bytes

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Panel:
        from rich import panel
        from rich.table import Table

        progress = self._progress
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, text in panel_rows(progress):
            table.add_row(name, text)
        if self._note:
            table.add_row("now", self._note)
        elapsed = f"{time.monotonic() - self._began:.0f} s"
        memory = f", {self._rss / 1e9:.1f} GB" if self._rss else ""
        title = f"{progress.config.name} {progress.run}" if progress.config else "starting"
        return panel.Panel(table, title=title, subtitle=f"{elapsed}{memory}   Ctrl-C stops cleanly", width=92)


def open_view(*, quiet: bool, json: bool) -> View:
    """The view that fits where the output goes; with `--json` standard output stays free."""
    if quiet:
        return SilentView()
    if sys.stderr.isatty() and not json:
        return LiveView()
    return PlainView(sys.stderr if json else sys.stdout)


def panel_rows(progress: Progress) -> list[tuple[str, str]]:
    """Name and text of each line of the panel."""
    total = progress.config.steps if progress.config else 0
    done = len(progress.steps)
    rows = [("step", f"{done} of {total}  {bar(done, total)}  burst {progress.burst}")]
    if progress.steps:
        rewards = [step.reward for step in progress.steps]
        rows.append(("reward", f"{rewards[-1]:.3f}  {sparkline(rewards, low=0.0, high=1.0)}"))
    if progress.measured or progress.measuring >= 0:
        rows.append(("held-out", held_out_text(progress)))
    level, room = progress.waterlevel, progress.capacity
    running = len(progress.running)
    rows.append(("waterlevel", f"w = {level}  capacity {room}  {bar(level, max(level, room, 1))}  running {running}"))
    for name, cell in sorted(progress.cells.items(), key=lambda item: (in_pool(item[0]), item[1].index)):
        rows.append((name, cell_text(name, cell, progress)))
    mean = progress.staleness_mean
    rows.append(("staleness", "-" if mean is None else f"{mean:.2f}"))
    rows.append(("tokens/s", f"{progress.tokens_per_s:.0f}  ({progress.sampled} sampled)"))
    groups = f"{progress.groups_ready} ready, {progress.groups_consumed} consumed"
    groups += f", {progress.groups_discarded} discarded" if progress.groups_discarded else ""
    groups += f"; {progress.surplus} surplus executions" if progress.surplus else ""
    rows.append(("groups", groups))
    calls = f"{progress.harness_calls} calls, {progress.reconnects} reconnects, {progress.harness_errors} errors"
    rows.append(("harness", calls))
    if progress.last_error:
        rows.append(("error", progress.last_error))
    return rows


def cell_text(name: str, cell: CellView, progress: Progress) -> str:
    role = cell.phase or cell.role
    if role == "train":
        role = "train, stepping" if progress.batch_open else "train"
    load = f"  {cell.load}/{cell.capacity} {bar(cell.load, cell.capacity, 16)}" if cell.serves else ""
    core = " (core)" if cell.index == 0 else ""
    return f"{role}{core}  v{cell.version}{load}"


def held_out_text(progress: Progress) -> str:
    """The measurements so far, and how far the open one is."""
    parts = []
    means = [(each.mean, each.version) for each in progress.measured if each.mean is not None]
    if means:
        mean, version = means[-1]
        parts.append(f"{mean:.3f} at v{version}  {sparkline([mean for mean, _ in means], low=0.0, high=1.0)}")
    if progress.measuring >= 0:
        parts.append(f"measuring v{progress.measuring}, {len(progress.held_out)} left")
    return "  ".join(parts) or "-"


def measured_line(measured: Measured) -> str:
    """One held-out measurement as one line."""
    notes = f", {measured.excluded} excluded" if measured.excluded else ""
    notes += f", {measured.late} late" if measured.late else ""
    if measured.mean is None or measured.std is None:
        return f"held-out v{measured.version}  no reward{notes}"
    return (
        f"held-out v{measured.version}  reward {measured.mean:.3f} +- {measured.std:.3f} ({measured.averaged}{notes})"
    )


def step_line(step: Step, progress: Progress) -> str:
    """One step as one line."""
    total = progress.config.steps if progress.config else 0
    mean = progress.staleness_mean
    roles = " ".join(
        f"{name}:{cell.phase.replace(' ', '-') or cell.role}" for name, cell in sorted(progress.cells.items())
    )
    return (
        f"step {step.step}/{total}  reward {step.reward:.3f}  loss {step.loss:+.4f}  gap {step.gap:.1e}  "
        f"masked {step.masked}/{step.executions}  w {progress.waterlevel}/{progress.capacity}  "
        f"staleness {'-' if mean is None else f'{mean:.2f}'}  tokens/s {progress.tokens_per_s:.0f}  "
        f"{step.seconds:.1f} s  {roles}"
    )


def sparkline(values: list[float], *, low: float, high: float) -> str:
    """One character a value, the last `_WIDTH` of them."""
    span = (high - low) or 1.0
    levels = [round(min(1.0, max(0.0, (value - low) / span)) * (len(BARS) - 2)) + 1 for value in values[-_WIDTH:]]
    return "".join(BARS[level] for level in levels)


def bar(part: float, whole: float, width: int = 20) -> str:
    full = round(width * min(1.0, part / whole)) if whole else 0
    return "━" * full + "╌" * (width - full)
