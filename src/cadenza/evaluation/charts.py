"""Plots as inline SVG without a plotting library: colours come from the page's CSS, so both themes work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 320, 186
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 10, 10, 34
_MAX_POINTS = 400  # drawn per line; more would only be overdrawn pixels


@dataclass(frozen=True)
class Line:
    """One curve. ``style``: CSS class s0..s4 that gives colour and dash. ``smooth``: also draw a running mean."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "s0"
    smooth: bool = False


def ticks(low: float, high: float, about: int = 4, whole: bool = False) -> list[float]:
    """Round numbers inside [low, high], roughly `about` of them; one when the range is empty or not finite.
    ``whole``: of things that are counted, no fractions."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= raw), 10 * power)
    if whole:
        step = math.ceil(step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)] or [low]


def number(value: float) -> str:
    """Short and readable: 0.35, 12, 3.4k, 1.2M, 3e-05."""
    size = abs(value)
    if size >= 999_500:
        return f"{value / 1e6:.3g}M"
    if size >= 9_999.5:
        return f"{value / 1e3:.3g}k"
    if size and size < 0.001:
        return f"{value:.0e}"
    return f"{value:.4g}" if size >= 1000 else f"{value:.3g}"


def signed(points: float) -> str:
    """+1.2 or −0.4, with a real minus sign; a value that rounds to zero has no sign."""
    text = f"{points:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def running_mean(ys: Sequence[float], window: int) -> list[float]:
    """Centred mean over up to `window` neighbours, narrower at the ends."""
    half = window // 2
    sums = [0.0]
    for y in ys:
        sums.append(sums[-1] + y)
    out = []
    for i in range(len(ys)):
        lo, hi = max(0, i - half), min(len(ys), i + half + 1)
        out.append((sums[hi] - sums[lo]) / (hi - lo))
    return out


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    percent: bool = False,
    zero: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """SVG of one chart. ``percent``: values are shares shown as %. ``zero``: the axis starts at 0.

    Raises ValueError when no line has a point: the caller then says what is missing.
    """
    lines = [line for line in lines if len(line.xs)]
    if not lines:
        raise ValueError("nothing to draw")
    x0, x1 = min(min(c.xs) for c in lines), max(max(c.xs) for c in lines)
    y0, y1 = y_range or _padded(min(min(c.ys) for c in lines), max(max(c.ys) for c in lines), zero, percent)
    x1 = x1 if x1 > x0 else x0 + 1

    def at(x: float, y: float) -> tuple[float, float]:
        px = _LEFT + (x - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)
        py = HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)
        return round(px, 1), round(py, 1)

    said = escape(_spoken(title, lines, x_label, percent))
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">']
    for y in ticks(y0, y1):
        _, py = at(x0, y)
        text = f"{100 * y:.3g}%" if percent else number(y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py}" y2="{py}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{py + 4}" text-anchor="end">{text}</text>')
    for x in ticks(x0, x1, whole=x_label == "step"):
        px, _ = at(x, y0)
        parts.append(
            f'<text class="tick" x="{px}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{number(x)}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>'
    )
    for curve in lines:
        parts += _curve(curve, at)
    return "".join([*parts, "</svg>"])


def _curve(curve: Line, at) -> list[str]:
    points = [at(x, y) for x, y in zip(curve.xs, curve.ys, strict=True)]
    if len(points) == 1:
        return [f'<circle class="dot {curve.style}" cx="{points[0][0]}" cy="{points[0][1]}" r="4"/>']
    out = []
    smooth = curve.smooth and len(points) >= 10
    out.append(f'<polyline class="{"raw " if smooth else ""}line {curve.style}" points="{_path(points)}"/>')
    if smooth:
        mean = running_mean(curve.ys, max(5, len(points) // 12))
        shown = [at(x, y) for x, y in zip(curve.xs, mean, strict=True)]
        out.append(f'<polyline class="line {curve.style}" points="{_path(shown)}"/>')
        points = shown
    out.append(f'<circle class="dot {curve.style}" cx="{points[-1][0]}" cy="{points[-1][1]}" r="3"/>')
    return out


def _path(points: Sequence[tuple[float, float]]) -> str:
    step = max(1, math.ceil(len(points) / _MAX_POINTS))
    kept = [*points[:-1:step], points[-1]]
    return " ".join(f"{x},{y}" for x, y in kept)


def _padded(low: float, high: float, zero: bool, percent: bool) -> tuple[float, float]:
    """The axis: the values with some room around them, but no share below 0 % and, unless there is one, above 100 %."""
    bottom = min(0.0, low) if zero else low
    room = (high - bottom) * 0.06 or abs(high) * 0.1 or (0.1 if percent else 1.0)
    start = bottom if zero and bottom == 0.0 else bottom - room
    end = high + room
    if percent and low >= 0.0:
        start = max(start, 0.0)
        end = end if high > 1.0 else min(end, 1.0)
    return start, end


def _spoken(title: str, lines: Sequence[Line], x_label: str, percent: bool) -> str:
    """What the picture shows, for a reader who cannot see it."""

    def say(y: float) -> str:
        return f"{100 * y:.1f}%" if percent else number(y)

    told = [f"{c.name}: from {say(c.ys[0])} to {say(c.ys[-1])}" for c in lines]
    span = f"{x_label} {number(min(c.xs[0] for c in lines))} to {number(max(c.xs[-1] for c in lines))}"
    return f"{title}. {span}. " + "; ".join(told)


@dataclass(frozen=True)
class Strip:
    """One lane of the timeline. ``blocks``: (start share, width share, level 0..1) of the window shown;
    ``busy``: share of the window in which at least one span was open; ``marks``: instants as shares."""

    lane: str
    blocks: list[tuple[float, float, float]]
    busy: float
    marks: list[float]


def strip(
    lane: str, spans: Sequence[tuple[float, float]], start: float, end: float, bins: int = 480
) -> Strip:
    """How many spans are open over time, in equal bins, relative to the lane's busiest bin."""
    width = (end - start) / bins
    load = [0.0] * bins
    marks = []
    for a, b in spans:
        if a == b:
            if start <= a <= end:
                marks.append((a - start) / (end - start))
            continue
        a, b = max(a, start), min(b, end)
        if b <= a:
            continue
        first, last = int((a - start) / width), min(bins - 1, int((b - start) / width))
        for i in range(first, last + 1):
            inside = min(b, start + (i + 1) * width) - max(a, start + i * width)
            load[i] += max(0.0, inside) / width
    peak = max(load) or 1.0
    levels = [math.ceil(4 * x / peak) / 4 if x > 0.02 else 0.0 for x in load]
    blocks = []
    i = 0
    while i < bins:
        j = i
        while j < bins and levels[j] == levels[i]:
            j += 1
        if levels[i] > 0:
            blocks.append((i / bins, (j - i) / bins, levels[i]))
        i = j
    return Strip(lane, blocks, _covered(spans, start, end), marks)


def _covered(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    total, reach = 0.0, start
    for a, b in sorted(spans):
        a, b = max(a, reach), min(b, end)
        if b > a:
            total += b - a
            reach = b
    return total / (end - start) if end > start else 0.0


def strip_svg(lane: Strip) -> str:
    """The lane as an SVG that stretches to any width (its text lives outside, in HTML)."""
    body = [
        f'<rect x="{1000 * x:.1f}" y="0" width="{1000 * w:.1f}" height="20" opacity="{level:.2f}"/>'
        for x, w, level in lane.blocks
    ]
    body += [f'<rect class="mark" x="{1000 * x - 1:.1f}" y="0" width="2" height="20"/>' for x in lane.marks]
    said = f"{lane.lane}: busy {100 * lane.busy:.0f}% of the window shown"
    return (
        f'<svg class="strip lane-{escape(lane.lane)}" viewBox="0 0 1000 20" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(said)}">{"".join(body)}</svg>'
    )
