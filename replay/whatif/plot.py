"""A sweep as one picture: time to the last step, idle cell-hours and staleness over the parameter, the recording beside them.

It follows the viewer's light or dark ground, as timelines do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape, quoteattr

from replay.timeline.axis import nice
from replay.timeline.palette import DARK, LIGHT
from replay.whatif.sweep import Point, Sweep

WIDTH, LEFT, RIGHT, TOP = 860, 92, 40, 100
PANEL, GAP, FOOT = 150, 46, 64
_MARGIN = 0.08
"""Of a panel's range, above and below what is drawn."""
PANELS: tuple[tuple[str, str, Callable[[Point], float | None]], ...] = (
    ("level", "hours to step {step}", lambda point: point.last_step_h),
    ("training", "idle cell-hours", lambda point: point.idle_cell_hours),
    ("ready", "mean staleness", lambda point: point.staleness_mean),
)
"""Colour, title, value."""


def svg(found: Sweep) -> str:
    """The picture's text."""
    points = [each for each in found.points if not each.refused]
    height = TOP + len(PANELS) * (PANEL + GAP) - GAP + FOOT
    title = f"{found.run}: {found.key}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label={quoteattr(title)} font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<style>{_style()}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        _text(LEFT, 30, title, anchor="start", size=17),
        f'<path class="was" d="M{LEFT} 51 h26"/>',
        _text(LEFT + 34, 55, f"as recorded, {found.key} = {_label(found.was)}", anchor="start"),
    ]
    at, joined = _places(points)
    for index, (colour, name, value) in enumerate(PANELS):
        top = TOP + index * (PANEL + GAP)
        parts += _panel(
            (top, colour, name.format(step=found.step)),
            [value(each) for each in points],
            value(found.recorded),
            at,
            joined=joined,
        )
    base = height - FOOT
    step = max(1, -(-len(points) // 14))
    parts += [_text(x, base + 20, _label(each.value)) for x, each in list(zip(at, points, strict=True))[::step]]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, base + 46, found.key))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _places(points: Sequence[Point]) -> tuple[list[float], bool]:
    """Numbers stand at their distance and are joined, words stand side by side."""
    inside = WIDTH - LEFT - RIGHT
    values = [each.value for each in points]
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values) and len(set(values)) > 1:
        low, high = min(values), max(values)
        return [LEFT + inside * (0.03 + 0.94 * (each - low) / (high - low)) for each in values], True
    return [LEFT + inside * (index + 0.5) / len(values) for index in range(len(values))], False


def _panel(
    placed: tuple[float, str, str],
    values: Sequence[float | None],
    recorded: float | None,
    at: Sequence[float],
    *,
    joined: bool,
) -> list[str]:
    top, colour, name = placed
    known = [each for each in [*values, recorded] if each is not None]
    parts = [_text(LEFT, top - 8, name, anchor="start", weight="bold")]
    if not known:
        return parts
    low, high = min(known), max(known)
    margin = _MARGIN * (high - low) or 0.05 * max(abs(high), 1.0)
    low, high = low - margin, high + margin

    def y(value: float) -> float:
        return top + PANEL * (1 - (value - low) / (high - low))

    step = nice((high - low) / 4)
    tick = -(-low // step) * step
    while tick <= high:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f} H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:.4g}", anchor="end"))
        tick += step
    if recorded is not None:
        parts.append(f'<path class="was" d="M{LEFT} {y(recorded):.1f} H{WIDTH - RIGHT}"/>')
    drawn = [(x, y(value)) for x, value in zip(at, values, strict=True) if value is not None]
    if joined:
        line = " L".join(f"{x:.1f} {height:.1f}" for x, height in drawn)
        parts.append(f'<path class="line {colour}" d="M{line}"/>')
    parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{height:.1f}" r="4"/>' for x, height in drawn]
    return parts


def _label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 13, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


def _style() -> str:
    def rules(colours: dict[str, str]) -> str:
        lines = "".join(
            f".line.{name}{{stroke:{colours[name]}}}.dot.{name}{{fill:{colours[name]}}}" for name, _, _ in PANELS
        )
        return (
            f".ground{{fill:{colours['ground']}}}text{{fill:{colours['ink']}}}.grid{{stroke:{colours['grid']}}}"
            f".was{{stroke:{colours['faint']}}}{lines}"
        )

    widths = ".line{fill:none;stroke-width:2}.grid{fill:none}.was{fill:none;stroke-width:1.4;stroke-dasharray:5 4}"
    return f"{widths}{rules(LIGHT)}@media (prefers-color-scheme: dark){{{rules(DARK)}}}"
