"""A timeline as one picture: roles of cells, waterlevel against capacity, ready groups against rho_min B.

    cell-0  ▒▒▒▒▒▒▒▒▒▒▒▒▒███████▒▒▒▒▒▒     one row a cell or pool engine, with its micro-steps where they are wide enough;
    cell-1  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒███▒▒▒▒▒▒     a dashed line where a step was made, a full one where weights were published
    w, C_R  ‾‾‾‾‾‾‾\\___/‾‾‾\\_____
    ready   ____/‾\\______/‾‾\\____

It follows the viewer's light or dark ground.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from replay.timeline.axis import nice, ticks
from replay.timeline.model import ROLES, CellRow, Document, split
from replay.timeline.palette import DARK, LIGHT, MEANING

WIDTH, LEFT, RIGHT, TOP = 1280, 112, 28, 128
LEVEL, GAP, FOOT = 150, 46, 44
ROWS = 640
"""Height of all rows together, at most: with many cells they get thinner, and sixty-four are still named one by one."""
_NAME = 10
"""Height of a row's name."""
_HAIR = 0.35
"""Pixels: what is narrower is drawn together with its neighbour."""
_TIMES = 12
_SHORT = ("leaving", "returning", "out")
_LETTER = 6.1
"""Mean width of a letter, in pixels."""

Row = tuple[int, int, int]


class Picture:
    def __init__(self, document: Document) -> None:
        self._d = document
        self._series = split(document)
        self._span = max(1, document.end)
        cells = sorted(enumerate(document.cells), key=lambda each: (each[1].pool, each[1].index))
        self._cells: list[tuple[int, CellRow]] = cells
        self._pitch = min(30.0, ROWS / max(1, len(cells)))
        self._named = math.ceil(_NAME / self._pitch)
        """Every so many rows have their name."""
        self._under = round(TOP + len(cells) * self._pitch)
        self._level_top = self._under + GAP
        self._ready_top = self._level_top + LEVEL + GAP
        self._bottom = self._ready_top + LEVEL * 0.6

    def svg(self) -> str:
        height = round(self._bottom + FOOT)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" aria-label={quoteattr(self._d.title)} font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<style>{_style()}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
            _text(LEFT, 30, self._d.title, size=17, weight="bold"),
            *self._legend(),
            *self._grid(),
            *self._rows(),
            *self._marks(),
            *self._waterlevel(),
            *self._supply(),
            *self._axis(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _x(self, t: int) -> float:
        return LEFT + t / self._span * (WIDTH - LEFT - RIGHT)

    def _rows_of(self, name: str, cell: int = -1) -> list[Row]:
        return self._series.get((name, cell), [])

    def _spans(self, rows: list[Row]) -> Iterator[tuple[int, int, int]]:
        """From, to, value."""
        for index, (start, _, value) in enumerate(rows):
            yield start, rows[index + 1][0] if index + 1 < len(rows) else self._d.end, value

    def _legend(self) -> list[str]:
        seen = {ROLES[value] for i, _ in self._cells for *_, value in self._rows_of("role", i)}
        shown = [name for name in MEANING if name in seen or (name == "idle" and "training" in seen)]
        parts, x, y = [], float(LEFT), 46
        for name in shown:
            if x + 30 + _LETTER * len(MEANING[name]) > WIDTH - RIGHT:
                x, y = float(LEFT), y + 22
            parts.append(f'<rect class="{name}" x="{x:.0f}" y="{y}" width="16" height="13"/>')
            if name == "training":
                parts.append(f'<rect class="training-next" x="{x + 16:.0f}" y="{y}" width="10" height="13"/>')
                x += 10
            parts.append(_text(x + 22, y + 11, MEANING[name]))
            x += 48 + _LETTER * len(MEANING[name])
        x, y = float(LEFT), y + 22
        for name, meaning in (("step", "training step made, with its number"), ("publication", "weights published, next dispatch")):
            parts.append(f'<path class="{name}" d="M{x + 8:.0f} {y - 1} v15"/>')
            parts.append(_text(x + 22, y + 11, meaning))
            x += 48 + _LETTER * len(meaning)
        return parts

    def _grid(self) -> list[str]:
        return [f'<path class="grid" d="M{self._x(t):.1f} {TOP} V{self._bottom:.1f}"/>' for t, _ in self._times()]

    def _times(self) -> list[tuple[int, str]]:
        return ticks(0, self._d.end, _TIMES)

    def _rows(self) -> list[str]:
        parts = []
        height = round(0.86 * self._pitch, 2)
        size = 13 if self._pitch >= 18 else 9
        for row, (index, cell) in enumerate(self._cells):
            y = round(TOP + row * self._pitch, 2)
            name = cell.name + (" (core)" if cell.index == 0 and not cell.pool else "")
            if row % self._named == 0:
                parts.append(_text(LEFT - 8, y + height / 2 + size * 0.36, name, anchor="end", size=size))
            spans = [
                ("idle" if ROLES[value] == "training" else ROLES[value], self._x(start), self._x(end))
                for start, end, value in self._spans(self._rows_of("role", index))
            ]
            parts += [_bar(state, x, y, max(right - x, 0.2), height) for state, x, right in spans if state not in _SHORT]
            parts += self._work(index, y, height)
            # A transition lasts seconds in a picture of hours: it is drawn wide enough to be seen, and above the rest.
            parts += [_bar(state, x, y, max(right - x, 1.4), height) for state, x, right in spans if state in _SHORT]
        return parts

    def _work(self, index: int, y: float, height: float) -> Iterator[str]:
        """Micro-steps, one after the other; those too narrow to be seen apart are one bar."""
        tone, left, right = "", 0.0, -1.0
        for start, end, value in self._spans(self._rows_of("micro_step", index)):
            if value < 0:
                continue
            x, x_end = self._x(start), self._x(end)
            apart = x_end - x > 3
            next_tone = "training" if _batch_of(self._d.names[value]) % 2 else "training-next"
            if tone and (next_tone != tone or x - right > _HAIR or apart):
                yield _bar(tone, left, y, max(right - left, 0.3), height)
                tone = ""
            if not tone:
                tone, left = next_tone, x
            # Wide ones keep a hair of ground between them.
            right = x_end - (0.8 if apart else 0)
        if tone:
            yield _bar(tone, left, y, max(right - left, 0.3), height)

    def _marks(self) -> list[str]:
        parts, taken = [], -99.0
        for t, _, step in self._rows_of("step"):
            x = self._x(t)
            parts.append(f'<path class="step" d="{self._line(x)}"/>')
            if x - taken > 17:
                parts.append(_text(x, TOP - 10, str(step), anchor="middle", size=11, kind="faint"))
                taken = x
        for t, _, _ in self._rows_of("published"):
            if t:
                parts.append(f'<path class="publication" d="{self._line(self._x(t))}"/>')
        return parts

    def _line(self, x: float) -> str:
        """Through rows and levels, not through what is written between them."""
        return (
            f"M{x:.1f} {TOP - 6} V{self._under} M{x:.1f} {self._level_top} v{LEVEL} "
            f"M{x:.1f} {self._ready_top} V{self._bottom:.0f}"
        )

    def _waterlevel(self) -> list[str]:
        w = waterlevel(self._rows_of("d"), self._rows_of("f"))
        capacity = self._rows_of("C_R")
        top, bottom = self._level_top, self._level_top + LEVEL
        most = max([value for *_, value in [*w, *capacity]], default=1) or 1
        return [
            *self._scale(top, bottom, most, "executions"),
            *self._key(top, [("level", "waterlevel w = d - f"), ("capacity", "capacity C_R of the serving cells")]),
            f'<path class="capacity" d="{self._stairs(capacity, most, top, bottom)}"/>',
            f'<path class="level" d="{self._stairs(w, most, top, bottom)}"/>',
        ]

    def _supply(self) -> list[str]:
        ready, supply = self._rows_of("ready"), self._rows_of("supply")
        top, bottom = self._ready_top, self._bottom
        bound = self._d.rules.rho_min * self._d.rules.B
        most = max([bound, *(value for *_, value in ready)], default=1) or 1
        y = bottom - bound / most * (bottom - top)
        area = self._stairs(supply, most, top, bottom)
        return [
            *self._scale(top, bottom, most, "groups"),
            *self._key(
                top,
                [
                    ("ready", "ready and unclaimed"),
                    ("supply", "of them those that the batch still needs"),
                    ("bound", f"rho_min B = {bound:g}"),
                ],
            ),
            f'<path class="supply" d="{area} V{bottom:.1f} H{self._x(supply[0][0]):.1f} Z"/>' if supply else "",
            f'<path class="ready" d="{self._stairs(ready, most, top, bottom)}"/>',
            f'<path class="bound" d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}"/>',
        ]

    def _scale(self, top: float, bottom: float, most: float, unit: str) -> Iterator[str]:
        yield _text(LEFT - 8, top - 10, unit, anchor="end", weight="bold")
        step = max(1.0, nice(most / 4))
        value = 0.0
        while value <= most:
            y = bottom - value / most * (bottom - top)
            yield f'<path class="grid" d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}"/>'
            yield _text(LEFT - 8, y + 4, f"{value:g}", anchor="end", size=11, kind="faint")
            value += step

    def _key(self, top: float, lines: list[tuple[str, str]]) -> Iterator[str]:
        x = float(LEFT)
        for name, meaning in lines:
            if name == "supply":
                yield f'<rect class="supply" x="{x:.0f}" y="{top - 20:.0f}" width="22" height="11"/>'
            else:
                yield f'<path class="{name}" d="M{x:.0f} {top - 14:.1f} h22"/>'
            yield _text(x + 28, top - 10, meaning)
            x += 54 + _LETTER * len(meaning)

    def _stairs(self, rows: list[Row], most: float, top: float, bottom: float) -> str:
        """Of every half pixel the last value and the extremes: a log has more points than a picture."""
        scale = (bottom - top) / most
        drawn: list[str] = []
        slot, low, high, last = -1, 0, 0, 0
        for t, _, value in rows:
            at = int((self._x(t) - LEFT) * 2)
            if at != slot:
                if slot >= 0:
                    drawn.append(_stroke(slot, [low, high, last], scale, bottom))
                slot, low, high = at, value, value
            low, high, last = min(low, value), max(high, value), value
        if slot < 0:
            return "M0 0"
        drawn.append(_stroke(slot, [low, high, last], scale, bottom))
        # A path begins with a point: "H x V y" of the first is "M x y" too.
        return f"M{drawn[0][1:].replace(' V', ' ', 1)} {' '.join(drawn[1:])} H{WIDTH - RIGHT}"

    def _axis(self) -> list[str]:
        y = self._bottom
        parts = [f'<path class="axis" d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}"/>']
        for t, text in self._times():
            parts.append(f'<path class="axis" d="M{self._x(t):.1f} {y:.1f} v6"/>')
            parts.append(_text(self._x(t), y + 21, text, anchor="middle"))
        parts.append(_text(WIDTH - RIGHT, y + 38, "time since the run began", anchor="end", size=11, kind="faint"))
        return parts


def waterlevel(dispatched: list[Row], finished: list[Row]) -> list[Row]:
    """w = d - f wherever one of them changes."""
    d = f = 0
    found = []
    for t, seq, value, of in sorted([(*row, 0) for row in dispatched] + [(*row, 1) for row in finished], key=lambda each: each[1]):
        d, f = (value, f) if of == 0 else (d, value)
        found.append((t, seq, d - f))
    return found


def _stroke(slot: int, values: list[int], scale: float, bottom: float) -> str:
    """To this half pixel, through lowest and highest to the last."""
    ys = dict.fromkeys(f"V{bottom - value * scale:.1f}" for value in values)
    last = f"V{bottom - values[-1] * scale:.1f}"
    return " ".join([f"H{LEFT + slot / 2:.1f}", *(y for y in ys if y != last), last])


def _batch_of(micro_step: str) -> int:
    digits = micro_step[2:].partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{width:.2f}" height="{height:g}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "normal", kind: str = "ink"
) -> str:
    bold = ' font-weight="bold"' if weight == "bold" else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{bold}>{escape(text)}</text>'


def _style() -> str:
    fills = ("ground", "ink", "faint", *MEANING, "training-next", "supply")
    lines = {
        "grid": "1",
        "axis": "1",
        "step": "1; stroke-dasharray: 3 3",
        "publication": "1.8",
        "level": "2",
        "capacity": "1.8; stroke-dasharray: 7 2",
        "ready": "1.8",
        "bound": "1.4; stroke-dasharray: 2 3",
    }

    def rules(colours: dict[str, str]) -> str:
        colours = {**colours, "axis": colours["faint"]}
        filled = "".join(f".{name}{{fill:{colours[name]}}}" for name in fills)
        return filled + "".join(f".{name}{{stroke:{colours[name]}}}" for name in lines)

    widths = "".join(f".{name}{{fill:none;stroke-width:{width.replace(' ', '', 1)}}}" for name, width in lines.items())
    return f"{widths}{rules(LIGHT)}@media (prefers-color-scheme: dark){{{rules(DARK)}}}"


def draw(document: Document) -> str:
    """The picture, SVG."""
    return Picture(document).svg()
