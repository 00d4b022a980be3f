"""The live plot: live bytes by category, drawn while a notebook cell is still running.

The whole picture is sent as one ``Bytes`` trait of at most 400 points. Traits, unlike custom
messages, reach a front end that is still opening. Each frame replaces the last one, so a slow
browser skips frames and never falls behind. When the block ends, a still picture replaces the
widget, so that a saved notebook shows it. A front end without widgets shows the HTML part of a
widget's output: a sentence, and the still picture if there is one. A kernel without widgets shows
only still pictures, and says so once.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..display import in_kernel, live_enabled
from ..measure.timeline import BY, OP, PHASE, TOTAL
from ..names import CATEGORIES, PHASES
from .style import COLORS, HATCHES, MAX_POINTS, display_size, png
from .timeline import PHASE_LABELS, describe, peak_of, plot_timeline

if TYPE_CHECKING:
    from ..measure.timeline import MemorySnapshot, Timeline


HEADER_VALUES = 8 + 2 * len(CATEGORIES)
_VERSION = 1
NO_WIDGETS = "This notebook program does not show widgets"
WAIT = f"{NO_WIDGETS}: a still picture appears here at the end."
STILL = f"{NO_WIDGETS}, so the picture stands still."


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
    """
    header = np.zeros(HEADER_VALUES, "<f8")
    header[0], header[2] = _VERSION, finished
    if timeline is None or not len(timeline):
        return header.tobytes()
    total, parts, phase, at = peak_of(timeline, peak)
    points = timeline.decimate(MAX_POINTS).rows
    last = timeline.rows[-1]
    header[1] = len(points)
    header[3:6] = total, timeline.rows[at, OP], PHASES.index(phase)
    header[6:8] = last[TOTAL], last[PHASE]
    header[8:14] = [parts[name] for name in CATEGORIES]
    header[14:20] = last[BY]
    if current is not None:
        header[6:8] = current.total, PHASES.index(current.phase)
        header[14:20] = [current.by_category[name] for name in CATEGORIES]
    columns = np.delete(points, TOTAL, axis=1)  # the total is the sum of its categories
    return header.tobytes() + np.ascontiguousarray(columns.T, "<f4").tobytes()


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
        names = traitlets.List(list(CATEGORIES)).tag(sync=True)
        colors = traitlets.List([COLORS[name] for name in CATEGORIES]).tag(sync=True)
        hatches = traitlets.List([HATCHES[name][:1] for name in CATEGORIES]).tag(sync=True)
        phases = traitlets.List([PHASE_LABELS.get(name, "") for name in PHASES]).tag(sync=True)
        frame = traitlets.Bytes(b"").tag(sync=True)

    return MemoryView


def plain_text(title: str) -> str:
    """``text/plain`` of every output here. It never changes, since notebook tests compare it."""
    return "MemoryTracker plot" + (f": {title}" if title else "")


def view_bundle(
    widget, words: str, sentence: str, still: tuple[dict, dict] = ({}, {})
) -> tuple[dict, dict]:
    """A widget's mimebundle with the ``still`` one.

    Its plain text is ``words``; its HTML is ``sentence`` and the picture.
    """
    bundle = widget._repr_mimebundle_()
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
    fallback = f"<em>{html.escape(sentence)}</em>"
    if picture := still[0].get("image/png"):
        shape = {"alt": "", **still[1].get("image/png", {})}
        attributes = " ".join(
            f'{name}="{html.escape(str(value))}"' for name, value in shape.items()
        )
        fallback += f'<br><img src="data:image/png;base64,{picture}" {attributes}>'
    data = {**still[0], **data, "text/html": fallback, "text/plain": words}
    return data, {**still[1], **metadata}


def picture_bundle(figure, alt: str, words: str) -> tuple[dict, dict]:
    """A still figure's mimebundle: (data, metadata)."""
    data = {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": words}
    return data, {"image/png": {**display_size(figure), "alt": alt}}


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
        self._widget = self._output = None

    def start(self) -> None:
        """Put the empty plot on the page."""
        if not live():
            return
        from IPython.display import display

        self._widget = widget_class()(
            title=self.title, budget=float(self.budget or 0), frame=encode_frame(None, None, None)
        )
        data, metadata = view_bundle(self._widget, plain_text(self.title), WAIT)
        self._output = display(data, metadata=metadata, raw=True, display_id=True)

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
        """Replace the moving picture by a still one, and drop the widget."""
        widget, output, self._widget, self._output = self._widget, self._output, None, None
        if not in_kernel():
            return
        try:
            data, metadata = still_bundle(timeline, title=self.title, budget=self.budget, peak=peak)
            if output is not None:
                output.update(data, metadata=metadata, raw=True)
            else:
                from IPython.display import display

                display(data, metadata=metadata, raw=True)
        finally:
            if widget is not None:
                widget.close()


def show_timeline(
    timeline: Timeline,
    *,
    title: str = "",
    budget: int | None = None,
    peak: MemorySnapshot | None = None,
) -> None:
    """Display a finished ``timeline`` as an interactive view (mouse, arrow keys), with the still
    picture in the bundle.

    Front ends without widgets, saved notebooks and ``GRADMEM_LIVE=0`` show the still picture.
    Outside a notebook, nothing is displayed.
    """
    if not in_kernel():
        return

    def widget():
        frame = encode_frame(timeline, peak, None, finished=True)
        return widget_class()(title=title, budget=float(budget or 0), frame=frame)

    still = still_bundle(timeline, title=title, budget=budget, peak=peak)
    _display(still, widget if len(timeline) else None, plain_text(title), STILL)


def show_explorer(explorer, text: str) -> None:
    """Display ``explorer`` (it has ``still_bundle()`` and ``widget()``) in a notebook; its
    text/plain is always ``text``.

    The output also contains the still picture, for readers without a kernel. ``GRADMEM_LIVE=0``:
    only the picture.
    """
    if in_kernel():
        sentence = f"{STILL} To explore, change the arguments and run the cell again."
        _display(explorer.still_bundle(), explorer.widget, text, sentence)


def _display(still: tuple[dict, dict], widget: Callable | None, words: str, sentence: str) -> None:
    from IPython.display import display

    data, metadata = view_bundle(widget(), words, sentence, still) if widget and live() else still
    display(data, metadata=metadata, raw=True)
