"""Small SVG plots for the report page: lines, bars with intervals, stacked shares. Colours come from the page's CSS.

Every function returns one <svg> as text, sized by its viewBox, so that it follows the width it is given. Values that
were not measured (None, NaN) leave a gap and are never drawn as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from headtrain.eval.report_data import known

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 14, 42
NAMES, ROW = 118, 34  # of bars: width of the names, height of a row


@dataclass
class Series:
    """One line: points (x, y), y None where nothing was measured. `css` is a colour class of the page."""

    name: str
    css: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False
    dots: bool = True


@dataclass
class Bar:
    """One bar: its value, optionally an interval, and what hovering over it says."""

    name: str
    css: str
    value: float | None
    interval: Sequence[float] | None = None
    note: str = ""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high], the first at or below low and the last at or above high."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_plot(
    series: Sequence[Series], x_name: str, y_name: str, *, y_low: float | None = 0.0,
    show: Callable[[float], str] = "{:g}".format, x_ticks: Sequence[float] | None = None, dots: bool = True,
    x_log: bool = False, mark: float | None = None,
) -> str:  # fmt: skip
    """Lines over a common x axis. `y_low`: where the y axis starts at the latest; None: near the lowest value.

    x_log: every doubling of x takes the same width, with a tick at each x. mark: a line across at that y.
    "" when nothing was measured.
    """
    drawn = [(x, y) for s in series for x, y in s.points if known(y)]
    if not drawn:
        return ""
    xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
    tall = [*ys, *([] if mark is None else [mark])]
    y_marks = ticks(min(tall) if y_low is None else min(y_low, *tall), max(tall))
    round_marks = sorted(set(xs)) if x_log else [t for t in ticks(min(xs), max(xs)) if min(xs) <= t <= max(xs)]
    x_marks = x_ticks if x_ticks is not None else round_marks
    scale = math.log2 if x_log else float
    x_span = (scale(min(xs)), scale(max(xs))) if max(xs) > min(xs) else (scale(min(xs)) - 1, scale(max(xs)) + 1)

    def at_x(x):
        return LEFT + (scale(x) - x_span[0]) / (x_span[1] - x_span[0]) * (WIDTH - LEFT - RIGHT)

    def at_y(y):
        return HEIGHT - BOTTOM - (y - y_marks[0]) / (y_marks[-1] - y_marks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [_frame(x_marks, y_marks, at_x, at_y, x_name, y_name, show)]
    if mark is not None:
        y = f"{at_y(mark):.1f}"
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
    for s in series:
        parts.append(_one_line(s, at_x, at_y, x_name, show, dots and s.dots))
    return _svg(HEIGHT, f"{y_name} by {x_name}", parts)


def _frame(x_marks, y_marks, at_x, at_y, x_name, y_name, show) -> str:
    parts = []
    for y in y_marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{at_y(y) + 4:.1f}" text-anchor="end">{show(y)}</text>')
    for x in x_marks:
        at = f'x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 17}"'
        parts.append(f'<text class="tick" {at} text-anchor="middle">{x:,g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')
    return "".join(parts)


def _one_line(series: Series, at_x, at_y, x_name: str, show, dots: bool) -> str:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in series.points:
        if known(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    parts = [f'<g class="{series.css}">']
    for run in runs:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in run)
        if len(run) > 1:
            parts.append(f'<polyline class="line" points="{path}"{dash}/>')
        for x, y in run if dots or len(run) == 1 else []:
            hint = f"{escape(series.name)}, {escape(x_name)} {x:,g}: {show(y)}"
            centre = f'cx="{at_x(x):.1f}" cy="{at_y(y):.1f}"'
            parts.append(f'<circle class="dot" {centre} r="4"><title>{hint}</title></circle>')
    return "".join([*parts, "</g>"])


def bar_plot(bars: Sequence[Bar], *, mark: float | None = None, show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Horizontal bars from 0, each with its value and, where there is one, its interval; `mark`: a line across."""
    ends = [b.value for b in bars if known(b.value)] + [b.interval[1] for b in bars if _interval(b)]
    if not ends:
        return ""
    value_width = 52
    high = max([*ends, 1e-9, *([] if mark is None else [mark])])

    def at_x(value):
        return NAMES + max(0.0, value) / high * (WIDTH - NAMES - value_width)

    parts = []
    for i, b in enumerate(bars):
        y = i * ROW + 7
        parts.append(f'<g class="{b.css}"><title>{escape(b.note or b.name)}</title>{_row_name(b.name, y)}')
        if not known(b.value):
            parts.append(f'<text class="tick" x="{NAMES + 4}" y="{y + 16}">not measured</text></g>')
            continue
        width = max(1.5, at_x(b.value) - NAMES)
        parts.append(f'<rect class="bar" x="{NAMES}" y="{y}" width="{width:.1f}" height="22" rx="3"/>')
        end = at_x(b.value)
        if _interval(b):
            low, high_end = at_x(b.interval[0]), at_x(b.interval[1])
            ends_of = f"M{low:.1f} {y + 6}v10M{high_end:.1f} {y + 6}v10"
            parts.append(f'<path class="whisker" d="M{low:.1f} {y + 11}H{high_end:.1f}{ends_of}"/>')
            end = max(end, high_end)
        parts.append(f'<text class="value" x="{end + 7:.1f}" y="{y + 16}">{show(b.value)}</text></g>')
    height = len(bars) * ROW + 4
    if mark is not None:
        parts.append(f'<line class="mark" x1="{at_x(mark):.1f}" x2="{at_x(mark):.1f}" y1="0" y2="{height}"/>')
    return _svg(height, "bars", parts)


def _interval(bar: Bar) -> bool:
    return bool(bar.interval) and all(map(known, bar.interval)) and known(bar.value)


def _row_name(name: str, y: float) -> str:
    return f'<text class="label" x="{NAMES - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'


def share_plot(rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]]) -> str:
    """Stacked horizontal bars that fill one width: rows of (name, [(part, css, share of 1)])."""
    if not rows:
        return ""
    parts = []
    for i, (name, shares) in enumerate(rows):
        x, y = float(NAMES), i * ROW + 7
        parts.append(_row_name(name, y))
        for part, css, share in shares:
            width = share * (WIDTH - NAMES - 2)
            parts.append(f'<g class="{css}"><title>{escape(name)}: {escape(part)} {share:.0%}</title>')
            parts.append(
                f'<rect class="bar" x="{x:.1f}" y="{y}" width="{max(0.0, width - 2):.1f}" height="22" rx="3"/>'
            )
            if width > 34:
                at = f'x="{x + width / 2 - 1:.1f}" y="{y + 15.5}"'
                parts.append(f'<text class="inside" {at} text-anchor="middle">{share:.0%}</text>')
            parts.append("</g>")
            x += width
    return _svg(len(rows) * ROW + 4, "shares of time", parts)


def _svg(height: float, label: str, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
