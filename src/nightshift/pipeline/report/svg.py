"""Charts as inline SVG. Horizontal positions are percentages and heights are pixels, so a chart fills the width of its
place while its text keeps its size, on a phone as on a wide screen. Colours are classes of style.css, and every series
has a marker of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from nightshift.statistics.intervals import Rate

LEFT, RIGHT = 11.0, 97.0
"""Percent of the width between which data lie."""
_BOTTOM = 34
_TOP = 12
_MARKS = {
    "dot": '<circle r="3.5"/>',
    "diamond": '<path d="M0-5 5 0 0 5-5 0z"/>',
    "triangle": '<path d="M0-5 5 4-5 4z"/>',
    "ring": '<circle r="3.5" class="hollow"/>',
}
_FEW_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where values lie: x from `first` to `last` over the width, y from 0 to `top` over the height."""

    first: float
    last: float
    top: float
    height: int

    def x(self, value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (value - self.first) / max(self.last - self.first, 1e-9)

    def y(self, value: float) -> float:
        return _TOP + (self.height - _TOP - _BOTTOM) * (1 - value / self.top)

    @property
    def ground(self) -> float:
        return self.y(0)


def whisker(rate: Rate, label: str) -> Markup:
    """A rate as a dot on a line from 0 to 100 %, its interval as a bar."""
    words = f"{label}: {100 * rate.rate:.1f} %, 95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f}"
    low, high, middle = (100 * value for value in (rate.low, rate.high, rate.rate))
    parts = [
        _line(0, 12, 100, 12, "track"),
        *(_line(tick, 7, tick, 17, "track") for tick in (0, 25, 50, 75, 100)),
        f'<rect class="interval" x="{low:.2f}%" y="8" width="{max(high - low, 0.4):.2f}%" height="8" rx="2"/>',
        f'<circle class="estimate" cx="{middle:.2f}%" cy="12" r="5"/>',
    ]
    return _svg(parts, 24, words, "whisker")


def success_curve(sampled: Mapping[int, float], greedy: Mapping[int, Rate], kept: int, words: str) -> Markup:
    """Success over iterations: sampled while training, greedy on validation states, and the iteration that was kept."""
    last = max([*sampled, *greedy, kept, 1])
    axes = Axes(first=0, last=last, top=1.0, height=230)
    kept_x = axes.x(kept)
    anchor = "end" if kept > last / 2 else "start"
    shift = -1 if kept > last / 2 else 1
    parts = [
        *_frame(axes, [(0, "0 %"), (0.25, ""), (0.5, "50 %"), (0.75, ""), (1, "100 %")], "iteration"),
        _line(kept_x, _TOP, kept_x, axes.ground, "kept"),
        _text(kept_x + shift, axes.y(0.06), f"kept: iteration {kept}", anchor, "note"),
        *_series(axes, sampled, "sampled", "dot"),
        *(_spread(axes.x(i), axes.y(rate.low), axes.y(rate.high), "greedy") for i, rate in greedy.items()),
        *_series(axes, {i: rate.rate for i, rate in greedy.items()}, "greedy", "diamond"),
    ]
    return _svg(parts, axes.height, words)


def metric_curve(values: Mapping[int, float], words: str, limit: float | None = None) -> Markup:
    """A metric by iteration, from 0 on, and the limit that it should stay below, if it has one."""
    top = max([*values.values(), limit or 0.0, 1e-6]) * 1.15
    axes = Axes(first=0, last=max([*values, 1]), top=top, height=170)
    ticks = [(0.0, "0"), (top / 1.15, f"{top / 1.15:.2g}")]
    parts = [*_frame(axes, ticks, "iteration"), *_series(axes, values, "metric", "ring")]
    if limit is not None:
        parts += [
            _line(LEFT, axes.y(limit), RIGHT, axes.y(limit), "limit"),
            _text(RIGHT, axes.y(limit) - 4, f"limit {limit:g}", "end", "note"),
        ]
    return _svg(parts, axes.height, words)


def strength_curve(points: Sequence[tuple[float, Rate]], other: Sequence[tuple[float, Rate]], words: str) -> Markup:
    """Success over the strength of a perturbation, with the interval as a band; `other`: another policy, if any."""
    axes = Axes(first=0, last=max(strength for strength, _ in (*points, *other)), top=1.0, height=190)
    played = sorted({strength for strength, _ in (*points, *other)})
    shown = played[:: -(-len(played) // _FEW_TICKS)]
    parts = list(_frame(axes, [(0, "0 %"), (0.25, ""), (0.5, "50 %"), (0.75, ""), (1, "100 %")], "strength", shown))
    for series, name, mark in ((other, "greedy", "diamond"), (points, "sampled", "dot")):
        if series:
            parts += [_band(axes, series, name), *_series(axes, {x: rate.rate for x, rate in series}, name, mark)]
    return _svg(parts, axes.height, words)


def _band(axes: Axes, points: Sequence[tuple[float, Rate]], name: str) -> str:
    """Intervals as one area. A polygon cannot have percentages, so it has a picture of its own that is stretched."""
    share = max(axes.last - axes.first, 1e-9) / 100
    upper = [f"{(x - axes.first) / share:.2f},{axes.y(rate.high):.1f}" for x, rate in points]
    lower = [f"{(x - axes.first) / share:.2f},{axes.y(rate.low):.1f}" for x, rate in reversed(points)]
    return (
        f'<svg x="{LEFT:.2f}%" y="0" width="{RIGHT - LEFT:.2f}%" height="{axes.height}" '
        f'viewBox="0 0 100 {axes.height}" preserveAspectRatio="none">'
        f'<polygon class="band {name}" points="{" ".join([*upper, *lower])}"/></svg>'
    )


def trend(nights: Sequence[tuple[str, Rate, bool]], champions: Sequence[float | None], words: str) -> Markup:
    """Success night by night, oldest first: (label, rate, became champion); the champion's own rate as a step line."""
    axes = Axes(first=0, last=max(len(nights) - 1, 1), top=1.0, height=240)
    parts = list(_frame(axes, [(0, "0 %"), (0.25, ""), (0.5, "50 %"), (0.75, ""), (1, "100 %")], ""))
    for place, (standing, following) in enumerate(zip(champions, [*champions[1:], None], strict=True)):
        if standing is not None:
            until = min(place + 1, axes.last)
            parts.append(_line(axes.x(place), axes.y(standing), axes.x(until), axes.y(standing), "champion"))
            if following is not None and following != standing:
                parts.append(_line(axes.x(until), axes.y(standing), axes.x(until), axes.y(following), "champion"))
    every = -(-len(nights) // _FEW_TICKS)
    for place, (label, rate, promoted) in enumerate(nights):
        x = axes.x(place)
        parts.append(_spread(x, axes.y(rate.low), axes.y(rate.high), "sampled"))
        parts.append(_mark(x, axes.y(rate.rate), "sampled", "triangle" if promoted else "dot"))
        if place % every == 0:
            parts.append(_text(x, axes.height - 16, label, "start" if place == 0 else "middle", "tick"))
    return _svg(parts, axes.height, words)


def _frame(
    axes: Axes, ticks: Sequence[tuple[float, str]], x_label: str, places: Sequence[float] | None = None
) -> list[str]:
    """`places`: of ticks along x; whole numbers without them."""
    parts = []
    for value, label in ticks:
        parts.append(_line(LEFT, axes.y(value), RIGHT, axes.y(value), "grid"))
        parts.append(_text(LEFT - 1.5, axes.y(value) + 4, label, "end", "tick"))
    if x_label:
        whole = range(int(axes.first), int(axes.last) + 1, max(1, -(-int(axes.last) // _FEW_TICKS)))
        along = whole if places is None else places
        parts += [_text(axes.x(value), axes.ground + 15, f"{value:g}", "middle", "tick") for value in along]
        parts.append(_text((LEFT + RIGHT) / 2, axes.height - 3, x_label, "middle", "tick"))
    return parts


def _series(axes: Axes, values: Mapping[int, float] | Mapping[float, float], name: str, mark: str) -> list[str]:
    points = [(axes.x(i), axes.y(value)) for i, value in values.items()]
    lines = [_line(*one, *other, name) for one, other in pairwise(points)]
    return [*lines, *(_mark(x, y, name, mark) for x, y in points)]


def legend_mark(name: str, mark: str) -> Markup:
    """The marker of a series, for a legend in HTML."""
    line = _line(0, 8, 100, 8, name) if name != "none" else ""
    return Markup('<svg class="key" width="28" height="16" aria-hidden="true">{}{}</svg>').format(
        Markup(line), Markup(_mark(50, 8, name, mark) if mark else "")
    )


def _mark(x: float, y: float, name: str, mark: str) -> str:
    return f'<svg x="{x:.2f}%" y="{y:.1f}" overflow="visible" class="{name}">{_MARKS[mark]}</svg>'


def _spread(x: float, low: float, high: float, name: str) -> str:
    """An interval."""
    return _line(x, low, x, high, f"{name} spread")


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return f'<line class="{name}" x1="{x1:.2f}%" y1="{y1:.1f}" x2="{x2:.2f}%" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.2f}%" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(parts: Sequence[str], height: int, words: str, name: str = "chart") -> Markup:
    """Every piece is made of numbers, names of classes and escaped text."""
    return Markup('<svg class="{}" width="100%" height="{}" role="img" aria-label="{}">{}</svg>').format(
        name, height, words, Markup("".join(parts))
    )
