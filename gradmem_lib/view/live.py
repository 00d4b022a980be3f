"""The live plot: live bytes by category, drawn while a notebook cell is still running.

The whole picture is sent as one ``Bytes`` trait of at most 400 points. Traits, unlike custom
messages, reach a front end that is still opening. Each frame replaces the last one, so a slow
browser skips frames and never falls behind. The widget takes a place in an HTML output (see
``place.py``), so a saved notebook does not refer to it.

When the block ends, the output becomes HTML that carries its last frame, its script and a still
picture. It is explored with mouse and keys, needs no kernel and no network, and stays in the saved
notebook. Where scripts do not run, the still picture shows. A kernel without widgets draws nothing
before the end, and says so once.
"""

from __future__ import annotations

import base64
import html
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..display import in_kernel, live_enabled
from ..measure.timeline import BY, OP, PHASE, TOTAL
from ..names import CATEGORIES, PHASES
from .interrupt import keep_own_lines
from .place import place, still_html
from .style import (
    COLORS,
    GROWING,
    GROWING_HATCH,
    HATCHES,
    MAX_POINTS,
    joined,
    picture_bundle,
    show_bundle,
)
from .timeline import GROWING_WORDS, PHASE_LABELS, describe, peak_of, plot_timeline

if TYPE_CHECKING:
    from ..measure.timeline import MemorySnapshot, Timeline


HEADER_VALUES = 8 + 2 * len(CATEGORIES)
_PLAIN, _WITH_MARKS = 1, 2  # versions of a frame
WAIT = "No picture yet: one appears here when this cell has run to its end."
STILL = "This picture stands still. To explore it, run the cell again."


def encode_frame(
    timeline: Timeline | None,
    peak: MemorySnapshot | None,
    current: MemorySnapshot | None,
    finished: bool = False,
) -> bytes:
    """One frame for the browser, little-endian.

    A header of 20 float64: version, number of points n, finished (0 or 1), peak bytes, the
    operation and phase of the peak, current bytes and phase, then the peak and the current bytes by
    category. After it 8 rows of n float32: operation, phase, and the bytes of each category.

    If bytes grow, or the batch's size changes, the version is 2, and more float32 follow. First
    comes the number of rows of growing bytes: 0, or one for each category. Then come these rows of
    n values, and a pair for each size of the batch: the operation where it begins, and its rows.
    """
    header = np.zeros(HEADER_VALUES, "<f8")
    header[0], header[2] = _PLAIN, finished
    if timeline is None or not len(timeline):
        return header.tobytes()
    total, parts, phase, at = peak_of(timeline, peak)
    shown = timeline.decimate(MAX_POINTS)
    points = shown.rows
    last = timeline.rows[-1]
    header[1] = len(points)
    header[3:6] = total, timeline.rows[at, OP], PHASES.index(phase)
    header[6:8] = last[TOTAL], last[PHASE]
    header[8:14] = [parts[name] for name in CATEGORIES]
    header[14:20] = last[BY]
    if current is not None:
        header[6:8] = current.total, PHASES.index(current.phase)
        header[14:20] = [current.by_category[name] for name in CATEGORIES]
    marks = _marks(shown)
    if marks:
        header[0] = _WITH_MARKS
    columns = points[:, [OP, PHASE, *range(points.shape[1])[BY]]]
    return header.tobytes() + np.ascontiguousarray(columns.T, "<f4").tobytes() + marks


def _marks(shown: Timeline) -> bytes:
    """Growing bytes and sizes of the batch, for a frame; empty if there are none."""
    if shown.growing is None and not shown.batches:
        return b""
    growing = np.zeros((0, len(shown)))  # (categories, samples), or no row
    if shown.growing is not None:
        growing = shown.growing.T
    marks = np.concatenate(([len(growing)], growing.ravel(), np.ravel(shown.batches)))
    return marks.astype("<f4").tobytes()


def frame_peak(frame: bytes) -> float:
    """The peak, in bytes, that ``frame`` states."""
    return float(np.frombuffer(frame, "<f8", 4)[3])


def live() -> bool:
    """Whether plots may move here: in a kernel with the widgets installed, unless the environment
    forbids it.
    """
    return live_enabled() and _widgets_load()


@cache
def _widgets_load() -> bool:
    try:
        import anywidget  # noqa: F401
        import ipywidgets  # noqa: F401
    except Exception as error:  # missing, or not compatible with what is installed
        print(f"Pictures stand still here, since the widgets do not load: {error}.")
        print("If you want them to move: pip install ipywidgets anywidget, and restart the kernel.")
        return False
    return True


# What a picture needs to know besides its frames, by the names of the script's settings.
APPEARANCE = {
    "names": list(CATEGORIES),
    "colors": [COLORS[name] for name in CATEGORIES],
    "hatches": [HATCHES[name][:1] for name in CATEGORIES],
    "phases": [PHASE_LABELS.get(name, "") for name in PHASES],
    "growing": [GROWING, GROWING_HATCH[:1], GROWING_WORDS],
}


@cache
def widget_class():
    # In a function, so that a plain script never imports the widget machinery.
    import anywidget
    import traitlets

    class MemoryView(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("live.js")
        _css = Path(__file__).with_name("live.css")
        title = traitlets.Unicode("").tag(sync=True)
        budget = traitlets.Float(0.0).tag(sync=True)
        top = traitlets.Float(0.0).tag(sync=True)  # the axis reaches at least these bytes
        small = traitlets.Bool(False).tag(sync=True)  # one of several, side by side
        names = traitlets.List(APPEARANCE["names"]).tag(sync=True)
        colors = traitlets.List(APPEARANCE["colors"]).tag(sync=True)
        hatches = traitlets.List(APPEARANCE["hatches"]).tag(sync=True)
        phases = traitlets.List(APPEARANCE["phases"]).tag(sync=True)
        growing = traitlets.List(APPEARANCE["growing"]).tag(sync=True)
        frame = traitlets.Bytes(b"").tag(sync=True)

    return MemoryView


def plain_text(title: str) -> str:
    """``text/plain`` of every output here. It never changes, since notebook tests compare it."""
    return joined("MemoryTracker plot", title)


def explorable_html(pictures: list[tuple[bytes, dict]], still: str) -> str:
    """HTML that draws ``pictures`` side by side, to be explored without a kernel.

    Each is a frame (see ``encode_frame``) and its settings: title, budget, top, small.
    ``still``: HTML for a page on which no script runs.
    """
    hosts = []
    for frame, own in pictures:
        settings = {"title": "", "budget": 0, "top": 0, "small": False, **APPEARANCE, **own}
        hosts.append(
            f"<div data-gradmem-settings='{html.escape(json.dumps(settings))}' "
            f'data-gradmem-frame="{base64.b64encode(frame).decode()}"></div>'
        )
    folder = Path(__file__).parent
    style = (folder / "live.css").read_text(encoding="utf-8")
    drawing = (folder / "live.js").read_text(encoding="utf-8").replace(_EXPORT, "")
    finding = (folder / "explorable.js").read_text(encoding="utf-8")
    return (
        f'<div class="gm-explorable"><style>{style}</style><div class="gm-row">{"".join(hosts)}'
        f'</div><div class="gm-still">{still}</div>'
        f"<script>(() => {{\n{drawing}\n{finding}\n}})();</script></div>"
    )


_EXPORT = "export default { render };\n"  # a widget's script is a module, one in a page is not


def still_bundle(
    timeline: Timeline | None,
    *,
    title: str = "",
    budget: int | None = None,
    peak: MemorySnapshot | None = None,
) -> tuple[dict, dict]:
    """The still picture as a mimebundle: (data, metadata). Without samples it says so in words."""
    if timeline is None or not len(timeline):
        words = describe(None, title=title)
        return {"text/html": f"<em>{words}</em>", "text/plain": plain_text(title)}, {}
    figure = plot_timeline(timeline, title=title, budget=budget, peak=peak)
    alt = describe(timeline, title=title, budget=budget, peak=peak)
    return picture_bundle(figure, alt, plain_text(title))


class LivePlot:
    """The moving picture of one tracked block: ``start``, then ``push`` at most ten times a second,
    then ``finish``.

    Outside a notebook it does nothing. With ``GRADMEM_LIVE=0`` it shows the still picture at the
    end and nothing before.
    """

    def __init__(self, *, title: str = "", budget: int | None = None):
        self.title, self.budget = title, budget
        self._widget = self._place = self._output = None

    def start(self) -> None:
        """Put the empty plot on the page."""
        if not live():
            return
        from IPython.display import display

        self._widget = widget_class()(
            title=self.title, budget=float(self.budget or 0), frame=encode_frame(None, None, None)
        )
        self._place = place(self._widget, keep=True)
        shown = self._place.html(f"<em>{WAIT}</em>")
        data = {"text/html": shown, "text/plain": plain_text(self.title)}
        self._output = display(data, raw=True, display_id=True)

    def push(
        self,
        timeline: Timeline,
        peak: MemorySnapshot,
        current: MemorySnapshot,
        phase: str | None = None,
    ) -> None:
        """Draw the next frame. All figures are bytes; ``phase`` is that of ``current``."""
        if self._widget is not None:
            self._widget.frame = encode_frame(timeline, peak, current)

    def finish(self, timeline: Timeline | None, peak: MemorySnapshot | None = None) -> None:
        """Replace the moving picture by a finished one, and drop the widget."""
        widgets, output = (self._place, self._widget), self._output
        self._widget = self._place = self._output = None
        if not in_kernel():
            return
        keep_own_lines()
        try:
            data, metadata = finished_bundle(
                timeline, title=self.title, budget=self.budget, peak=peak
            )
            if output is not None:
                output.update(data, metadata=metadata, raw=True)
            else:
                show_bundle(data, metadata)
        finally:
            for widget in widgets:
                if widget is not None:
                    widget.close()


def finished_bundle(
    timeline: Timeline | None,
    *,
    title: str = "",
    budget: int | None = None,
    peak: MemorySnapshot | None = None,
) -> tuple[dict, dict]:
    """A finished picture as a mimebundle: to be explored, and still where no script runs.

    With ``GRADMEM_LIVE=0``, it is still everywhere.
    """
    data, metadata = still_bundle(timeline, title=title, budget=budget, peak=peak)
    if live_enabled() and "image/png" in data:
        frame = encode_frame(timeline, peak, None, finished=True)
        still = still_html((data, metadata), "")
        settings = {"title": title, "budget": float(budget or 0)}
        data = {**data, "text/html": explorable_html([(frame, settings)], still)}
    return data, metadata


def show_timeline(
    timeline: Timeline,
    *,
    title: str = "",
    budget: int | None = None,
    peak: MemorySnapshot | None = None,
) -> None:
    """Display a finished ``timeline`` as an interactive view (mouse, arrow keys), with the still
    picture in the bundle.

    With ``GRADMEM_LIVE=0``, it is a still picture. Outside a notebook, nothing is displayed.
    """
    if in_kernel():
        show_bundle(*finished_bundle(timeline, title=title, budget=budget, peak=peak))


def show_explorer(explorer, text: str) -> None:
    """Display ``explorer`` (it has ``still_bundle()`` and ``widget()``) in a notebook; its
    text/plain is always ``text``.

    The output also contains the still picture, for readers without a kernel. ``GRADMEM_LIVE=0``:
    only the picture.
    """
    if not in_kernel():
        return
    data, metadata = explorer.still_bundle()
    if live():
        shown = place(explorer.widget()).html(still_html((data, metadata), STILL))
        data = {**data, "text/html": shown, "text/plain": text}
    show_bundle(data, metadata)
