"""Draws charts as inline SVG without a library: lines over steps, and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 26
_MAX_BARS = 120
_SMOOTH_FROM = 40  # points; a longer line gets a trend line drawn over it

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line. `dots` marks every point, for values that only some steps have."""

    label: str
    points: Points
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """Size of a chart in its own units. Text has a fixed size in them, so a wide chart needs a wide one."""

    width: int
    height: int

    @property
    def plot_width(self) -> int:
        """Width of the area between the axes."""
        return self.width - _LEFT - _RIGHT

    @property
    def plot_height(self) -> int:
        """Height of the area between the axes."""
        return self.height - _TOP - _BOTTOM


CARD = Canvas(width=370, height=200)
WIDE = Canvas(width=860, height=280)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    low: float
    high: float
    length: float

    def __call__(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) * self.length


def line_chart(series: Sequence[Series], canvas: Canvas = CARD) -> str:
    """Lines over steps with axes, a tooltip for each value, and a legend if there are several lines."""
    drawn = [line for line in series if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    x_scale = _x_scale(xs, canvas)
    y_scale, ticks = _y_scale(ys, canvas, from_zero=False)
    parts = [_axes(canvas, x_scale, y_scale, ticks)]
    parts += [_line(canvas, line, number, x_scale, y_scale) for number, line in enumerate(drawn)]
    return _figure(canvas, parts, [line.label for line in drawn])


def stacked_bars(columns: Sequence[float], layers: Mapping[str, Sequence[float]], canvas: Canvas) -> str:
    """One bar per column with its layers stacked; many columns are averaged into fewer bars.

    Args:
        columns: x of every bar, ascending.
        layers: one value (0 or more) per column for each layer, from the bottom up.
    """
    columns, layers = _thin(columns, layers)
    totals = [sum(values[i] for values in layers.values()) for i in range(len(columns))]
    step = (columns[-1] - columns[0]) / max(1, len(columns) - 1) or 1.0
    x_scale = _Scale(low=columns[0] - step / 2, high=columns[-1] + step / 2, length=canvas.plot_width)
    y_scale, ticks = _y_scale(totals, canvas, from_zero=True)
    parts = [_axes(canvas, x_scale, y_scale, ticks)]
    width = max(0.8, canvas.plot_width / len(columns) * 0.82)
    bases = [0.0] * len(columns)
    for number, (name, values) in enumerate(layers.items()):
        rects = []
        for i, value in enumerate(values):
            if value <= 0:
                continue
            top, height = y_scale(bases[i] + value), y_scale(value)
            x, y = _LEFT + x_scale(columns[i]) - width / 2, _TOP + canvas.plot_height - top
            tip = f"step {columns[i]:g}: {name} {value:.3g} s of {totals[i]:.3g} s"
            rects.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.2f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            bases[i] += value
        parts.append(f'<g class="fill c{number}">{"".join(rects)}</g>')
    return _figure(canvas, parts, list(layers))


def ticks_between(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    spacing = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / spacing + 1e-9)
    last = math.ceil(high / spacing - 1e-9)
    return [float(f"{k * spacing:.9g}") for k in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis: few characters, no noise."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{value:.4g}"


def _x_scale(xs: Sequence[float], canvas: Canvas) -> _Scale:
    low, high = min(xs), max(xs)
    return _Scale(low=low, high=high if high > low else low + 1, length=canvas.plot_width)


def _y_scale(ys: Sequence[float], canvas: Canvas, *, from_zero: bool) -> tuple[_Scale, list[float]]:
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = (low, high + pad) if from_zero else (low - pad, high + pad)
    ticks = ticks_between(low, high)
    return _Scale(low=ticks[0], high=ticks[-1], length=canvas.plot_height), ticks


def _axes(canvas: Canvas, x_scale: _Scale, y_scale: _Scale, y_ticks: Sequence[float]) -> str:
    parts = []
    for tick in y_ticks:
        y = _TOP + canvas.plot_height - y_scale(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{canvas.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in ticks_between(x_scale.low, x_scale.high, 6):
        if tick != int(tick) or not x_scale.low <= tick <= x_scale.high:
            continue
        x = _LEFT + x_scale(tick)
        parts.append(f'<text x="{x:.1f}" y="{canvas.height - 8}" text-anchor="middle">{int(tick)}</text>')
    y = _TOP + canvas.plot_height
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{canvas.width - _RIGHT}" y1="{y}" y2="{y}"/>')
    return "".join(parts)


def _line(canvas: Canvas, series: Series, number: int, x_scale: _Scale, y_scale: _Scale) -> str:
    places = [(_LEFT + x_scale(x), _TOP + canvas.plot_height - y_scale(y)) for x, y in series.points]
    trend = not series.dots and len(places) >= _SMOOTH_FROM
    parts = [_path(places, "raw" if trend else "")]
    if trend:
        parts.append(_path(_smooth(places), ""))
    radius = 3.2 if series.dots or len(places) == 1 else 5
    kind = "" if series.dots or len(places) == 1 else ' class="hit"'
    for (x, y), (px, py) in zip(series.points, places, strict=True):
        tip = escape(f"step {x:g}: {series.label} {y:.5g}")
        parts.append(f'<circle{kind} cx="{px:.1f}" cy="{py:.1f}" r="{radius}"><title>{tip}</title></circle>')
    return f'<g class="stroke c{number}">{"".join(parts)}</g>'


def _path(places: Points, kind: str) -> str:
    if len(places) < 2:
        return ""
    words = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    name = f' class="{kind}"' if kind else ""
    return f'<polyline{name} points="{words}"/>'


def _smooth(places: Points) -> list[tuple[float, float]]:
    """Fits a straight line to each point's neighbours, the nearest with the most weight.

    Unlike a running mean it does not lag, and it does not bend at the ends.
    """
    reach = max(3, len(places) // 10)
    smooth = []
    for i, (x, _) in enumerate(places):
        near = places[max(0, i - reach) : i + reach + 1]
        span = max(abs(px - x) for px, _ in near)
        weights = [math.exp(-2.0 * ((px - x) / span) ** 2) for px, _ in near]
        total = sum(weights)
        mean_x = sum(w * px for w, (px, _) in zip(weights, near, strict=True)) / total
        mean_y = sum(w * py for w, (_, py) in zip(weights, near, strict=True)) / total
        covariance = sum(w * (px - mean_x) * (py - mean_y) for w, (px, py) in zip(weights, near, strict=True))
        variance = sum(w * (px - mean_x) ** 2 for w, (px, _) in zip(weights, near, strict=True))
        smooth.append((x, mean_y + covariance / variance * (x - mean_x)))
    return smooth


def _thin(
    columns: Sequence[float], layers: Mapping[str, Sequence[float]]
) -> tuple[list[float], dict[str, list[float]]]:
    size = -(-len(columns) // _MAX_BARS)
    bins = [range(i, min(i + size, len(columns))) for i in range(0, len(columns), size)]
    means = {
        name: [sum(values[i] for i in group) / len(group) for group in bins]
        for name, values in layers.items()
    }
    return [columns[group[0]] for group in bins], means


def _figure(canvas: Canvas, parts: Sequence[str], labels: Sequence[str]) -> str:
    keys = "".join(f'<span class="key c{i}">{escape(label)}</span>' for i, label in enumerate(labels))
    legend = f'<div class="legend">{keys}</div>' if len(labels) > 1 else ""
    return f'<svg viewBox="0 0 {canvas.width} {canvas.height}" role="img">{"".join(parts)}</svg>{legend}'
