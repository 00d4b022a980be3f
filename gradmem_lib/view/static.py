"""Still pictures of memory: stacked areas over a run, stacked bars against a card.

One palette serves every picture of the course. Its six colours differ in lightness by at least nine steps of CIE L*,
so they stay apart in greyscale and for colour-blind readers, and each category also carries a hatch of its own.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

from ..tracker import CATEGORIES, PHASES
from ..units import GiB, KiB, MiB, TiB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..tracker import MemorySnapshot, Timeline

COLORS = {
    "parameters": "#234a8a",
    "gradients": "#bd2b52",
    "optimizer": "#1b9880",
    "activations": "#f0893c",
    "temporaries": "#f3dc8c",
    "other": "#b4bfcd",
}
# In matplotlib's notation; the live plot and the SVG draw the same signs.
HATCHES = {
    "parameters": "",
    "gradients": "\\\\",
    "optimizer": "--",
    "activations": "//",
    "temporaries": "..",
    "other": "xx",
}
PHASE_LABELS = {"forward": "forward", "backward": "backward", "optimizer_step": "optimizer step"}
_SHORT_PHASE_LABELS = {"forward": "fwd", "backward": "bwd", "optimizer_step": "step"}
PHASE_COLORS = {"forward": "#dfe3ea", "backward": "#7b8495", "optimizer_step": "#262c38"}

INK, MUTED, PAPER, ALARM = "#1d2330", "#5b6473", "#ffffff", "#c4312b"
MAX_POINTS = 400
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "hatch.linewidth": 0.6,
    "text.color": INK,
    "axes.linewidth": 0.8,
    "path.simplify": False,
    "axes.formatter.use_locale": False,
}
_DPI = 160


def is_dark(color: str) -> bool:
    """Whether light ink reads better than dark ink on ``color`` (``"#rrggbb"``)."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 110


def scale_of(top: int) -> tuple[int, str]:
    """The unit for an axis that reaches ``top`` bytes: (bytes in one unit, its name)."""
    for factor, unit in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if top >= factor:
            return factor, unit
    return 1, "B"


def nice_step(span: float, parts: int = 4) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that cuts ``span`` into about ``parts``."""
    wanted = max(span, 1e-9) / parts
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(power * f for f in (1, 2, 5, 10) if power * f >= wanted * 0.8)


def axis_top(highest: int, budget: int | None) -> int:
    """Bytes at the upper end of the axis. A budget far above the run is left out, or it would flatten the picture."""
    return round(max(highest, budget if budget and budget <= 2.5 * highest else 0, 1) * 1.08)


def peak_of(timeline: Timeline, peak: MemorySnapshot | None) -> tuple[int, dict[str, int], str, int]:
    """(total bytes, bytes by category, phase, sample index) of ``peak``, or of the timeline's largest sample."""
    at = timeline.peak_index
    if peak is None:
        row = timeline.rows[at].tolist()
        return row[2], dict(zip(CATEGORIES, row[3:], strict=True)), PHASES[row[1]], at
    # The peak's sample may be another than the largest, after reset_peak().
    same = (timeline.rows[:, 2] == peak.total).nonzero()[0]
    return peak.total, peak.by_category, peak.phase, int(same[0]) if len(same) else at


def describe(timeline: Timeline | None, *, title: str = "", budget: int | None = None, peak=None) -> str:
    """The picture in words, for those who do not see it."""
    name = f"Memory of {title}" if title else "Memory"
    if timeline is None or not len(timeline):
        return f"{name}: nothing was recorded."
    total, parts, phase, at = peak_of(timeline, peak)
    listed = ", ".join(f"{k} {format_bytes(n)}" for k, n in sorted(parts.items(), key=lambda kv: -kv[1]) if n)
    limit = "" if budget is None else f" Budget: {format_bytes(budget)} ({budget:,} bytes)."
    return (
        f"{name} over {timeline.events[-1]:,} operations, stacked by category. Peak: {format_bytes(total)} ({total:,} bytes) "
        f"at operation {timeline.events[at]:,}, in {PHASE_LABELS.get(phase, phase)}: {listed}.{limit}"
    )


# Stacked areas over a run -------------------------------------------------------------------------------------------


def plot_timeline(
    timeline: Timeline, *, title: str = "", budget: int | None = None, ax: Axes | None = None, peak=None
) -> Figure:
    """Draw live bytes by category over the operations of ``timeline``, with its phases and its peak.

    Values hold until the next sample, so the areas are steps: memory does not change between operations.

    Args:
        timeline: what a tracker recorded, in bytes.
        title: a heading.
        budget: bytes; drawn as a line.
        ax: matplotlib axes to draw into; a new figure with a legend beside it without.
        peak: the ``MemorySnapshot`` of the peak; the timeline's largest sample without.

    Returns the matplotlib ``Figure``. Raises ``ValueError`` if the timeline has no samples.
    """
    if not len(timeline):
        raise ValueError("this timeline has no samples: run something inside `with MemoryTracker(...)` first")
    total, parts, phase, _ = peak_of(timeline, peak)
    with _style():
        if ax is not None:
            _draw_areas(ax, timeline, budget, peak)
            if title:
                ax.set_title(title, loc="left", pad=24)
            return ax.figure
        figure = _new_figure(8.6, 3.5)
        axes = figure.add_axes((0.078, 0.145, 0.672, 0.66))
        used = _draw_areas(axes, timeline, budget, peak)
        figure.text(0.078, 0.93, title or "Memory by category", fontsize=11, fontweight="bold", va="baseline")
        figure.text(0.772, 0.93, "peak", color=MUTED, va="baseline")
        figure.text(
            0.985, 0.93, format_bytes(total), fontsize=11, fontweight="bold", ha="right", va="baseline"
        )
        where = PHASE_LABELS.get(phase, phase)
        figure.text(0.772, 0.865, f"in {where}" if phase != "idle" else "", color=MUTED, fontsize=6.8)
        figure.text(0.985, 0.865, f"{total:,} bytes", color=MUTED, fontsize=6.8, ha="right")
        _draw_legend(figure, 0.772, 0.79, parts, used)
    return figure


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG file: the same bytes for the same picture, and small, since notebooks are kept in git."""
    from PIL import Image

    raw, packed = io.BytesIO(), io.BytesIO()
    with _style():
        figure.savefig(raw, format="png", dpi=_DPI, metadata={"Software": None}, facecolor=PAPER)
    # A flat drawing needs few colours; without dithering, equal pixels stay equal.
    image = (
        Image.open(raw).convert("RGB").quantize(96, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    )
    image.save(packed, format="PNG", optimize=True)
    return packed.getvalue()


def display_size(figure: Figure) -> dict[str, int]:
    """Width and height, in CSS pixels, at which ``png(figure)`` is meant to be shown."""
    width, height = figure.get_size_inches()
    return {"width": round(width * 100), "height": round(height * 100)}


@contextmanager
def _style():
    """The course's own settings, whatever the reader's matplotlibrc says."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcParams.update({k: v for k, v in matplotlib.rcParamsDefault.items() if k not in _KEEP_RC})
        matplotlib.rcParams.update(_RC)
        yield


_KEEP_RC = {"backend", "backend_fallback", "interactive", "toolbar", "timezone", "datapath", "webagg.address"}


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that shows itself in a notebook, without pyplot."""

        def _repr_mimebundle_(self, include=None, exclude=None, **kwargs):
            import base64

            data = {"image/png": base64.b64encode(png(self)).decode(), "text/plain": "Memory figure"}
            return data, {"image/png": display_size(self)}

    return Picture(figsize=(width, height), dpi=100, facecolor=PAPER)


def _draw_areas(ax: Axes, timeline: Timeline, budget: int | None, peak) -> list[str]:
    """Draw into ``ax``; returns the phases that occur."""
    import numpy as np

    total, _, _, at = peak_of(timeline, peak)
    shown = timeline.decimate(MAX_POINTS)
    x = np.asarray(shown.events)
    if len(x) == 1:  # one sample has no width: let it hold for one operation
        x = np.append(x, x + 1)
    factor, unit = scale_of(max(total, *shown.totals))
    top = axis_top(max(total, *shown.totals), budget)
    low = np.zeros(len(x))
    for name in CATEGORIES:
        values = np.resize(np.asarray(shown.by_category[name], dtype=float) / factor, len(x))
        if values.any():
            ax.fill_between(
                x,
                low,
                low + values,
                step="post",
                facecolor=COLORS[name],
                hatch=HATCHES[name],
                edgecolor=_hatch_ink(COLORS[name]),
                linewidth=0.0,
                zorder=2,
            )
            ax.step(x, low + values, where="post", color=PAPER, linewidth=0.7, zorder=2.5)
            low = low + values
    ax.step(x, low, where="post", color=INK, linewidth=0.8, zorder=3)

    ax.set_xlim(x[0], x[-1])
    ax.set_ylim(0, top / factor)
    ax.set_facecolor(PAPER)
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7, zorder=0)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.tick_params(colors=MUTED, length=3, width=0.7, labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("operations", color=MUTED, fontsize=8.5)
    ax.set_ylabel(unit, color=MUTED, fontsize=8.5)
    step = nice_step(top / factor)
    ax.set_yticks(np.arange(0, top / factor, step))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.xaxis.get_major_locator().set_params(integer=True)

    _mark_peak(ax, timeline.events[at], total / factor, total)
    if budget is not None:
        # On the side where the peak is not, so that the two labels stay apart.
        _mark_budget(ax, budget, factor, top, right=timeline.events[at] < (x[0] + x[-1]) / 2)
    return _draw_phases(ax, x, shown.phases)


def _hatch_ink(color: str):
    return (1, 1, 1, 0.45) if is_dark(color) else (0.06, 0.08, 0.12, 0.30)


def _halo(width: float = 2.5):
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=width, foreground=PAPER)]


def _mark_peak(ax: Axes, x: float, y: float, nbytes: int) -> None:
    left, right = ax.get_xlim()
    near_right = x > left + 0.75 * (right - left)
    ax.plot([x], [y], marker="o", markersize=6, color=INK, markeredgecolor=PAPER, zorder=6, clip_on=False)
    ax.annotate(
        f"peak {format_bytes(nbytes)}",
        (x, y),
        xytext=(-8 if near_right else 8, 3),
        textcoords="offset points",
        ha="right" if near_right else "left",
        va="bottom",
        fontsize=8.5,
        fontweight="bold",
        zorder=7,
        path_effects=_halo(),
    )


def _mark_budget(ax: Axes, budget: int, factor: int, top: int, right: bool) -> None:
    label = f"budget {format_bytes(budget)}"
    if budget <= top:
        ax.axhline(budget / factor, color=ALARM, linewidth=1.4, linestyle=(0, (5, 3)), zorder=5)
    else:
        label += " (above this picture)"
    at = min(budget, top)
    ax.annotate(
        label,
        (int(right), at / factor),
        xycoords=("axes fraction", "data"),
        xytext=(-5 if right else 5, -3),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        color=ALARM,
        fontsize=8.5,
        fontweight="bold",
        zorder=7,
        path_effects=_halo(),
    )


def phase_runs(events, phases) -> list[tuple[str, float, float]]:
    """Neighbouring samples of one phase as (phase, first operation, operation where the next begins)."""
    runs: list[list] = []
    for event, phase in zip(events, phases, strict=False):
        if runs and runs[-1][0] == phase:
            continue
        if runs:
            runs[-1][2] = event
        runs.append([phase, event, event])
    if runs:
        runs[-1][2] = events[-1]
    return [tuple(run) for run in runs]


def _draw_phases(ax: Axes, x, phases: list[str]) -> list[str]:
    """The strip above the areas: one box a phase, named where the name fits."""
    from matplotlib.patches import Rectangle

    across = ax.get_xaxis_transform()
    points = ax.get_position().width * ax.figure.get_size_inches()[0] * 72 / max(x[-1] - x[0], 1)
    runs = [run for run in phase_runs(x, phases) if run[0] in PHASE_LABELS]
    for phase, start, stop in runs:
        color = PHASE_COLORS[phase]
        ax.add_patch(
            Rectangle(
                (start, 1.015),
                stop - start,
                0.06,
                transform=across,
                facecolor=color,
                edgecolor=PAPER,
                linewidth=0.6,
                clip_on=False,
            )
        )
        fitting = (
            name
            for name in (PHASE_LABELS[phase], _SHORT_PHASE_LABELS[phase])
            if 4.5 * len(name) + 4 < (stop - start) * points
        )
        if label := next(fitting, ""):
            ax.text(
                (start + stop) / 2,
                1.043,
                label,
                transform=across,
                ha="center",
                va="center_baseline",
                fontsize=7.5,
                color="#ffffff" if is_dark(color) or phase == "backward" else INK,
            )
        if len(runs) <= 24:
            ax.axvline(start, color=INK, alpha=0.16, linewidth=0.7, zorder=4)
    return [phase for phase in PHASE_LABELS if any(run[0] == phase for run in runs)]


def _draw_legend(figure: Figure, x: float, y: float, parts: Mapping[str, int], phases: list[str]) -> None:
    """Categories from the top of the stack to its foot, with their bytes at the peak; then the phases."""
    from matplotlib.patches import Rectangle

    def row(y, label, color, hatch, value):
        figure.add_artist(
            Rectangle(
                (x, y - 0.026),
                0.021,
                0.052,
                transform=figure.transFigure,
                facecolor=color,
                hatch=hatch * 2,
                edgecolor=_hatch_ink(color),
                linewidth=0.0,
            )
        )
        figure.text(x + 0.029, y, label, va="center_baseline", fontsize=8.5)
        figure.text(0.985, y, value, va="center_baseline", ha="right", fontsize=8.5)

    figure.text(0.985, y, "at the peak", color=MUTED, fontsize=8, ha="right", va="center_baseline")
    for name in reversed(CATEGORIES):
        y -= 0.075
        row(y, name, COLORS[name], HATCHES[name], format_bytes(parts[name]))
    y -= 0.035
    for phase in phases:
        y -= 0.068
        row(y, PHASE_LABELS[phase], PHASE_COLORS[phase], "", "")


# Stacked bars against a card ----------------------------------------------------------------------------------------


def plot_bars(
    bars: Mapping[str, Mapping[str, int]], *, cards: Mapping[str, int] | None = None, title: str = "",
    note: str = "",
) -> Figure:  # fmt: skip
    """``bar_svg`` for print: ``bars`` maps a label to bytes by category, ``cards`` a name to bytes."""
    cards = dict(cards or {})
    top = _bars_top(bars, cards)
    factor, unit = scale_of(top)
    with _style():
        height = 1.55 + 0.62 * len(bars)
        figure = _new_figure(8.6, height)
        ax = figure.add_axes((0.02, 0.92 / height, 0.96, (height - 1.62) / height))
        for row, parts in enumerate(bars.values()):
            left = 0.0
            for name in CATEGORIES:
                width = parts.get(name, 0) / factor
                if not width:
                    continue
                ax.barh(
                    -row,
                    width,
                    0.5,
                    left=left,
                    color=COLORS[name],
                    hatch=HATCHES[name],
                    edgecolor=_hatch_ink(COLORS[name]),
                    linewidth=0,
                )
                left += width
        for row, (label, parts) in enumerate(bars.items()):
            ax.text(
                0, 0.30 - row, label, ha="left", va="bottom", fontsize=8.5, path_effects=_halo(5), zorder=6
            )
            total = sum(parts.values())
            ax.text(
                total / factor,
                -row,
                f"  {format_bytes(total)}",
                va="center",
                fontweight="bold",
                path_effects=_halo(5),
                zorder=6,
            )
        for name, nbytes in cards.items():
            ax.axvline(nbytes / factor, color=ALARM, linewidth=1.4, linestyle=(0, (5, 3)), zorder=5)
            ax.annotate(
                name,
                (nbytes / factor, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color=ALARM,
                fontsize=8.5,
                fontweight="bold",
            )
        ax.set_xlim(0, top / factor)
        ax.set_ylim(0.55 - len(bars), 0.62)
        ax.set_yticks([])
        ax.set_facecolor(PAPER)
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        ax.tick_params(colors=MUTED, length=3, labelsize=8)
        ax.set_xlabel(unit, color=MUTED, fontsize=8.5)
        figure.text(0.02, 1 - 0.28 / height, title, fontsize=11, fontweight="bold", va="baseline")
        figure.text(0.98, 1 - 0.28 / height, note, fontsize=9, ha="right", va="baseline")
        _draw_legend_row(figure, height)
    return figure


def _draw_legend_row(figure: Figure, height: float) -> None:
    for i, name in enumerate(CATEGORIES):
        x, y = 0.02 + i * 0.163, 0.2 / height
        _swatch(figure, name, (x, y), (0.021, 0.18 / height))
        figure.text(x + 0.028, y, name, va="center_baseline", fontsize=8.5)


def _swatch(figure: Figure, name: str, at: tuple[float, float], size: tuple[float, float]) -> None:
    """A category's colour and hatch, from ``at`` to the right and centred on its height; parts of the figure's width and height."""
    from matplotlib.patches import Rectangle

    patch = Rectangle(
        (at[0], at[1] - size[1] / 2),
        *size,
        transform=figure.transFigure,
        facecolor=COLORS[name],
        hatch=HATCHES[name] * 2,
        edgecolor=_hatch_ink(COLORS[name]),
        linewidth=0,
    )
    figure.add_artist(patch)


def _bars_top(bars: Mapping[str, Mapping[str, int]], cards: Mapping[str, int]) -> int:
    return round(1.13 * max([sum(parts.values()) for parts in bars.values()] + list(cards.values()) + [1]))


def bar_svg(
    bars: Mapping[str, Mapping[str, int]], *, cards: Mapping[str, int] | None = None, title: str = "Memory",
    width: int = 760,
) -> str:  # fmt: skip
    """Horizontal stacked bars by category against the lines of one or more cards, as one inline ``<svg>``.

    Args:
        bars: label of a bar -> category -> bytes. Categories are those of the tracker.
        cards: name of a card -> bytes; drawn as dashed lines.
        title: what the picture shows, read out by screen readers.
        width: CSS pixels at most; narrower places shrink it.

    Text takes the colour of its surroundings, so the picture follows light and dark themes. Raises ``ValueError`` on
    categories that the palette does not know.
    """
    unknown = sorted({name for parts in bars.values() for name in parts} - set(CATEGORIES))
    if unknown:
        raise ValueError(f"no colour for {', '.join(unknown)}: the categories are {', '.join(CATEGORIES)}")
    cards = dict(cards or {})
    top, pad, bar, row = _bars_top(bars, cards), 2, 40, 70
    head = 22 if cards else 4
    foot = head + row * len(bars)
    legend_y, height = foot + 34, foot + 50
    inner = width - 2 * pad

    def px(nbytes: float) -> float:
        return round(pad + nbytes / top * inner, 1)

    words = "; ".join(
        f"{label}: {format_bytes(sum(parts.values()))} in all, of which "
        + ", ".join(f"{name} {format_bytes(parts[name])}" for name in CATEGORIES if parts.get(name))
        for label, parts in bars.items()
    )
    against = "".join(f" Line: {name}, {format_bytes(n)}." for name, n in cards.items())
    # Pattern names must differ between two pictures of one page, and be the same in every run.
    key = "gm" + hashlib.sha1(repr((bars, cards, title, width)).encode()).hexdigest()[:8]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{key}t {key}d" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px;height:auto;display:block;color:inherit;'
        f'font:13px var(--jp-ui-font-family,system-ui,sans-serif)">',
        f'<title id="{key}t">{escape(title)}</title><desc id="{key}d">{escape(words)}.{escape(against)}</desc>',
        f"<defs>{''.join(_svg_pattern(key, name) for name in CATEGORIES)}</defs>",
    ]
    labels = []
    for i, parts in enumerate(bars.values()):
        y, left = head + i * row, 0
        y += 22
        if cards:
            room = px(max(cards.values())) - pad
            out.append(
                f'<rect x="{pad}" y="{y}" width="{room:.1f}" height="{bar}" fill="currentColor" opacity=".07"/>'
            )
        for name in CATEGORIES:
            nbytes = parts.get(name, 0)
            if not nbytes:
                continue
            x, w = px(left), px(left + nbytes) - px(left)
            out.append(
                f'<rect class="gm-part" data-category="{name}" data-bytes="{nbytes}" x="{x}" y="{y}" width="{max(w, 0.5):.1f}" '
                f'height="{bar}" fill="url(#{key}{name})"><title>{name}: {format_bytes(nbytes)} ({nbytes:,} bytes)</title></rect>'
            )
            labels.append(_svg_label(name, nbytes, x, y, w, bar))
            left += nbytes
    for name, nbytes in cards.items():
        x = px(nbytes)
        anchor = "end" if x > width * 0.8 else "start" if x < width * 0.2 else "middle"
        out.append(
            f'<line class="gm-card" data-bytes="{nbytes}" x1="{x}" x2="{x}" y1="{head - 4}" y2="{foot + 2}" '
            f'stroke="{_ALARM_BOTH}" stroke-width="2" stroke-dasharray="6 4"/>'
            f'<text x="{x}" y="{head - 8}" text-anchor="{anchor}" fill="{_ALARM_BOTH}" font-weight="700">{escape(name)}</text>'
        )
    halo = 'style="paint-order:stroke;stroke:var(--jp-layout-color0,transparent);stroke-width:7px"'
    out += labels  # after the lines, which would run through the words
    for i, (label, parts) in enumerate(bars.items()):
        y, total = head + i * row, sum(parts.values())
        out.append(
            f'<text x="{pad}" y="{y + 14}" fill="currentColor" {halo}>{escape(label)}</text>'
            f'<text x="{px(total) + 7}" y="{y + 22 + bar / 2 + 5}" fill="currentColor" font-weight="700" {halo}>'
            f"{format_bytes(total)}</text>"
        )
    factor, unit = scale_of(top)
    step = nice_step(top / factor, 6)
    out.append(
        f'<line x1="{pad}" x2="{width - pad}" y1="{foot}" y2="{foot}" stroke="currentColor" opacity=".35"/>'
    )
    tick = 0.0
    while tick * factor < top * 0.97:
        words = f"{tick:g} {unit}" if tick else "0"
        anchor = "middle" if tick else "start"
        out.append(
            f'<text x="{px(tick * factor)}" y="{foot + 15}" text-anchor="{anchor}" font-size="11" fill="currentColor" '
            f'opacity=".75">{words}</text>'
        )
        tick += step
    for i, name in enumerate(CATEGORIES):
        x = pad + i * inner / len(CATEGORIES)
        out.append(
            f'<rect x="{x:.1f}" y="{legend_y - 1}" width="16" height="12" fill="url(#{key}{name})"/>'
            f'<text x="{x + 22:.1f}" y="{legend_y + 9}" font-size="12" fill="currentColor">{name}</text>'
        )
    return "".join(out) + "</svg>"


# Reads on white and on black alike.
_ALARM_BOTH = "#e0483f"


def _svg_label(name: str, nbytes: int, x: float, y: float, w: float, bar: int) -> str:
    """The part's name and size inside its box, as far as they fit."""
    size = format_bytes(nbytes)
    dark = is_dark(COLORS[name])
    ink, halo = ("#ffffff", COLORS[name]) if dark else ("#14181f", COLORS[name])
    lines = [text for text in (name, size) if len(text) * 6.4 + 10 < w]
    if len(lines) < 2:
        lines = [size] if len(size) * 6.4 + 8 < w else []
    return "".join(
        f'<text x="{x + w / 2:.1f}" y="{y + bar / 2 + (4.5 if len(lines) == 1 else -3 + 15 * i)}" text-anchor="middle" '
        f'font-size="11.5" fill="{ink}" pointer-events="none" '
        f'style="paint-order:stroke;stroke:{halo};stroke-width:3.5px;stroke-linejoin:round">{text}</text>'
        for i, text in enumerate(lines)
    )


def _svg_pattern(key: str, name: str) -> str:
    color, hatch = COLORS[name], HATCHES[name][:1]
    ink = 'stroke="#fff" stroke-opacity=".45"' if is_dark(color) else 'stroke="#10141c" stroke-opacity=".3"'
    marks = {
        "": "",
        "/": '<path d="M-2 2L2 -2M0 8L8 0M6 10L10 6"/>',
        "\\": '<path d="M-2 6L2 10M0 0L8 8M6 -2L10 2"/>',
        "-": '<path d="M0 4H8"/>',
        ".": '<path d="M2 2h.01M6 6h.01" stroke-width="2" stroke-linecap="round"/>',
        "x": '<path d="M0 0L8 8M0 8L8 0"/>',
    }[hatch]
    return (
        f'<pattern id="{key}{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{color}"/><g {ink} fill="none">{marks}</g></pattern>'
    )
