"""A picture of a run: roles of cells over time, batches and publications, and the waterlevel below. SVG, from a log.

    cell-0  ▒▒▒▒▒▒▒▒▒▒▒▒▒███████▒▒▒▒▒▒     one row a cell or pool engine: rollout, on its way, training at work, training
    cell-1  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒███▒▒▒▒▒▒     without a micro-step; a thin line where a step was made, a strong one where
    w, C_R  ‾‾‾‾‾‾‾\\___/‾‾‾\\_____         weights were published

Fed with events, so it draws simulated and real logs alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape

import msgspec

from schemas import events as e
from schemas.envelope import Event

WIDTH, LEFT, RIGHT, TOP = 1280, 104, 24, 96
LANE, GAP, LEVEL, FOOT = 24.0, 5.0, 190, 46
ROWS = 640
"""Height of all rows together, at most: with many cells they get thinner, down to a line each."""
COLOURS = {"rollout": "#9ec9e2", "moving": "#5b5b5b", "train": "#e8743b", "wait": "#f8d5b8", "away": "#ffffff"}
MEANING = {
    "rollout": "rollout",
    "train": "training",
    "wait": "training role, no micro-step to do",
    "moving": "changing role",
}
_MAX_TICKS = 14
_NAME = 12
"""Height of a row's name."""


class Span(msgspec.Struct, frozen=True):
    start_us: int
    end_us: int
    state: str


class Lane:
    """What one cell did: spans that follow each other."""

    def __init__(self, name: str, now_us: int) -> None:
        self.name = name
        self.spans: list[Span] = []
        self.state, self.since_us = "rollout", now_us
        self.busy = 0

    def turn(self, state: str, now_us: int) -> None:
        if state == self.state:
            return
        if now_us > self.since_us:
            if self.spans and self.spans[-1].state == self.state and self.spans[-1].end_us == self.since_us:
                self.spans[-1] = Span(self.spans[-1].start_us, now_us, self.state)
            else:
                self.spans.append(Span(self.since_us, now_us, self.state))
        self.state, self.since_us = state, now_us


class Timeline:
    """Takes the events of a run in order; `svg` draws what it has seen."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.lanes: dict[str, Lane] = {}
        self.steps: list[tuple[int, int]] = []
        self.publications: list[int] = []
        self.level: list[tuple[int, int]] = []
        """Time and w = d - f."""
        self.capacity: list[tuple[int, int]] = []
        """Time and C_R."""
        self._start_us = self._end_us = self._w = 0
        self._sizes: dict[str, int] = {}
        self._open: set[str] = set()
        """Training executions that have not ended."""
        self._handlers = {
            "cell.joined": self._joined,
            "cell.role-transition": self._moved,
            "micro-step.claimed": self._claimed,
            "micro-step.done": self._done,
            "micro-step.released": self._released,
            "execution.dispatched": self._dispatched,
            "execution.cancelled": self._ended,
            "execution.finished": self._ended,
            "batch.stepped": self._stepped,
            "burst.ended": self._published,
        }
        self._holders: dict[str, str] = {}

    def see(self, event: Event) -> None:
        self._start_us = self._start_us or event.time_us
        self._end_us = max(self._end_us, event.time_us)
        handler = self._handlers.get(event.kind)
        if handler is not None and not isinstance(event.data, msgspec.Raw):
            handler(event)

    def svg(self) -> str:
        for lane in self.lanes.values():
            lane.turn("", self._end_us)
        return _Drawing(self, self._start_us, max(self._end_us, self._start_us + 1)).whole()

    def _joined(self, event: Event) -> None:
        data: e.CellJoined = event.data
        if event.entity not in self.lanes:
            self.lanes[event.entity] = Lane(event.entity, event.time_us)
            self._sizes[event.entity] = data.capacity
            self._serve(event.time_us)

    def _moved(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        lane = self.lanes.get(event.entity)
        if lane is None:
            return
        if data.phase == "decided":
            lane.busy = 0
            lane.turn("moving", event.time_us)
        elif data.phase == "completed":
            lane.turn("wait" if data.target == "train" else "rollout", event.time_us)
        elif data.phase == "failed":
            lane.turn("away", event.time_us)
        self._serve(event.time_us)

    def _serve(self, now_us: int) -> None:
        served = sum(self._sizes[name] for name, lane in self.lanes.items() if lane.state == "rollout")
        self.capacity.append((now_us, served))

    def _claimed(self, event: Event) -> None:
        data: e.MicroStepClaimed = event.data
        self._holders[event.entity] = data.cell
        lane = self.lanes.get(data.cell)
        if lane is not None and lane.state in ("wait", "train"):
            lane.busy += 1
            lane.turn("train", event.time_us)

    def _done(self, event: Event) -> None:
        lane = self.lanes.get(self._holders.pop(event.entity, ""))
        if lane is not None and lane.state == "train":
            lane.busy -= 1
            if lane.busy <= 0:
                lane.busy = 0
                lane.turn("wait", event.time_us)

    def _released(self, event: Event) -> None:
        self._done(event)

    def _dispatched(self, event: Event) -> None:
        if event.data.measurement:
            return
        self._open.add(event.entity)
        self._w += 1
        self.level.append((event.time_us, self._w))

    def _ended(self, event: Event) -> None:
        """Finished, or cancelled before."""
        if event.entity in self._open:
            self._open.discard(event.entity)
            self._w -= 1
            self.level.append((event.time_us, self._w))

    def _stepped(self, event: Event) -> None:
        self.steps.append((event.time_us, event.data.step))

    def _published(self, event: Event) -> None:
        self.publications.append(event.time_us)


class _Drawing:
    def __init__(self, timeline: Timeline, start_us: int, end_us: int) -> None:
        self._t, self._start_us, self._span_us = timeline, start_us, end_us - start_us
        self._lanes = sorted(
            timeline.lanes.values(), key=lambda lane: (lane.name.startswith("pool"), _number(lane.name))
        )
        room = max(1.0, ROWS / max(1, len(self._lanes)))
        self._lane = min(LANE, 0.85 * room)
        self._pitch = min(LANE + GAP, room)
        self._named = math.ceil(_NAME / self._pitch)
        """Every so many rows have their name."""
        self._size = 13 if self._named == 1 else 11
        self._under = round(TOP + len(self._lanes) * self._pitch)
        self._level_top = self._under + 44
        self._height = self._level_top + LEVEL + FOOT

    def whole(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
            f'height="{self._height}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{self._height}" fill="#ffffff"/>',
            _text(LEFT, 26, self._t.title, size=17, weight="bold"),
            *self._legend(),
            *self._rows(),
            *self._marks(),
            *self._levels(),
            *self._axis(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _x(self, time_us: int) -> float:
        return LEFT + (time_us - self._start_us) / self._span_us * (WIDTH - LEFT - RIGHT)

    def _legend(self) -> list[str]:
        parts, x = [], float(LEFT)
        for state, meaning in MEANING.items():
            parts.append(f'<rect x="{x}" y="40" width="16" height="14" fill="{COLOURS[state]}"/>')
            parts.append(_text(x + 22, 52, meaning))
            x += 44 + 7.0 * len(meaning)
        for colour, width, dash, meaning in (
            ("#555555", 1, "3 3", "training step made (its number above)"),
            ("#b0183a", 2, "", "weights published, next dispatch"),
        ):
            dashed = f' stroke-dasharray="{dash}"' if dash else ""
            parts.append(f'<path d="M{x + 6} 39 V55" stroke="{colour}" stroke-width="{width}"{dashed}/>')
            parts.append(_text(x + 16, 52, meaning))
            x += 38 + 6.6 * len(meaning)
        return parts

    def _rows(self) -> list[str]:
        parts = []
        for row, lane in enumerate(self._lanes):
            y = TOP + row * self._pitch
            label = f"{lane.name} (core)" if lane.name == "cell-0" else lane.name
            if row % self._named == 0:
                parts.append(_text(LEFT - 8, y + self._lane / 2 + 5, label, anchor="end", size=self._size))
            for span in lane.spans:
                x = self._x(span.start_us)
                # A transition lasts seconds in a picture of hours: it is drawn wide enough to be seen.
                width = max(self._x(span.end_us) - x, 1.2 if span.state == "moving" else 0.2)
                fill = COLOURS[span.state]
                parts.append(
                    f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{self._lane:.2f}" fill="{fill}"/>'
                )
        return parts

    def _marks(self) -> list[str]:
        parts, taken = [], -99.0
        for time_us, step in self._t.steps:
            x = self._x(time_us)
            parts.append(
                f'<path d="{self._line(x)}" stroke="#555555" stroke-width="1" stroke-dasharray="3 3" opacity="0.7"/>'
            )
            if x - taken > 20:
                parts.append(_text(x, TOP - 10, str(step), anchor="middle", size=11))
                taken = x
        for time_us in self._t.publications:
            x = self._x(time_us)
            parts.append(f'<path d="{self._line(x)}" stroke="#b0183a" stroke-width="2" opacity="0.75"/>')
        return parts

    def _line(self, x: float) -> str:
        """Through the rows and through the levels, not through what is written between them."""
        return f"M{x:.2f} {TOP - 6} V{self._under:.1f} M{x:.2f} {self._level_top} V{self._level_top + LEVEL}"

    def _levels(self) -> list[str]:
        top, bottom = self._level_top, self._level_top + LEVEL
        most = max([value for _, value in [*self._t.level, *self._t.capacity]], default=1) or 1
        step = _nice(most / 4)
        parts = [_text(LEFT, top - 12, "executions:", weight="bold")]
        x = float(LEFT + 98)
        for colour, meaning in (
            ("#1f5f8b", "waterlevel w = dispatched - finished"),
            ("#3b7d3b", "capacity C_R of the serving cells"),
        ):
            parts.append(f'<path d="M{x} {top - 16} h22" stroke="{colour}" stroke-width="2.4"/>')
            parts.append(_text(x + 28, top - 12, meaning))
            x += 46 + 6.7 * len(meaning)
        value = 0.0
        while value <= most:
            y = bottom - value / most * LEVEL
            parts.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="#dddddd"/>')
            parts.append(_text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
            value += step
        for colour, points in (("#3b7d3b", self._t.capacity), ("#1f5f8b", self._t.level)):
            parts.append(
                f'<path d="{self._stairs(points, most, bottom)}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
            )
        return parts

    def _stairs(self, points: list[tuple[int, int]], most: int, bottom: float) -> str:
        """Steps, at most one a tenth of a pixel: a log has more points than a picture."""
        drawn: list[str] = []
        last, y_last = -1.0, bottom
        for time_us, value in points:
            x, y = self._x(time_us), bottom - value / most * LEVEL
            if x - last >= 0.1 or abs(y - y_last) > 1:
                drawn.append(f"H{x:.1f} V{y:.1f}" if drawn else f"M{x:.1f} {y:.1f}")
                last, y_last = x, y
        return " ".join([*drawn, f"H{WIDTH - RIGHT}"]) if drawn else "M0 0"

    def _axis(self) -> list[str]:
        y = self._level_top + LEVEL
        hours = self._span_us / 3.6e9
        step = _nice(hours / _MAX_TICKS)
        parts, value = [], 0.0
        while value <= hours:
            x = self._x(self._start_us + round(value * 3.6e9))
            parts.append(f'<path d="M{x:.1f} {y} v6" stroke="#333333"/>')
            parts.append(_text(x, y + 20, f"{value:g}", anchor="middle"))
            value += step
        parts.append(f'<path d="M{LEFT} {y} H{WIDTH - RIGHT}" stroke="#333333"/>')
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, y + 38, "hours since the start", anchor="middle"))
        return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="#222222">{escape(text)}</text>'
    )


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _nice(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below."""
    power = 1e-6
    while power * 10 <= least:
        power *= 10
    return round(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least or factor == 10), 6)


def draw(events: Iterable[Event], *, title: str) -> str:
    """The picture of a whole log."""
    timeline = Timeline(title)
    for event in events:
        timeline.see(event)
    return timeline.svg()
