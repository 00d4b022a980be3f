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
import gzip
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..display import cell_id, in_kernel, live_enabled
from ..measure.timeline import BY, OP, PHASE, TOTAL
from ..names import CATEGORIES, PHASES
from .blocks import encode_blocks
from .interrupt import keep_own_lines
from .place import place, show_bundle, still_html
from .style import COLORS, GROWING, GROWING_HATCH, HATCHES, MAX_POINTS, PHASE_LABELS, joined
from .timeline import GROWING_WORDS, describe, highest_of, peak_of

if TYPE_CHECKING:
    from ..measure.timeline import MemorySnapshot, Timeline


HEADER_VALUES = 8 + 2 * len(CATEGORIES)
WAIT = "No picture yet: one appears here when this cell has run to its end."


def encode_frame(
    timeline: Timeline | None,
    peak: MemorySnapshot | None,
    current: MemorySnapshot | None,
    finished: bool = False,
) -> bytes:
    """One frame for the browser, little-endian.

    A header of 20 float64: 0, number of points n, finished (0 or 1), peak bytes, the operation and
    phase of the peak, current bytes and phase, then the peak and the current bytes by category.
    After it 8 rows of n float32: operation, phase, and the bytes of each category.

    Then more float32 follow. First comes the number of rows of growing bytes: 0 if none grow, or
    one for each category. Then come these rows of n values, and a pair for each size of the batch,
    if it changes: the operation where it begins, and its rows.
    """
    header = np.zeros(HEADER_VALUES, "<f8")
    header[2] = finished
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
    growing = np.zeros((0, len(shown)))  # (categories, samples), or no row
    if shown.growing is not None:
        growing = shown.growing.T
    columns = points[:, [OP, PHASE, *range(points.shape[1])[BY]]].T
    body = [columns.ravel(), [len(growing)], growing.ravel(), np.ravel(shown.batches)]
    return header.tobytes() + np.concatenate(body).astype("<f4").tobytes()


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
    "looks": [(COLORS[name], HATCHES[name][:1]) for name in CATEGORIES],
    "phases": [PHASE_LABELS.get(name, "") for name in PHASES],
    "growing": {"name": GROWING_WORDS, "look": (GROWING, GROWING_HATCH[:1])},
}
# The files of the script in the order of their imports, which one script does without: all names at
# their top are names of one scope.
SCRIPTS = ("words", "run", "stack", "draw", "say", "parts", "moves", "plot")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)


@cache
def drawing(*more: str) -> str:
    """The script that draws, with ``render`` in it; and the files that are named."""
    folder = Path(__file__).parent / "plot"
    parts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in (*SCRIPTS, *more)]
    return _IMPORT.sub("", "".join(parts)).replace("\nexport ", "\n")


def looks() -> str:
    """The style sheet of the picture."""
    return Path(__file__).with_name("live.css").read_text(encoding="utf-8")


@cache
def widget_class():
    # In a function, so that a plain script never imports the widget machinery.
    import anywidget
    import traitlets

    class MemoryView(anywidget.AnyWidget):
        _esm = drawing() + "\nexport default { render };\n"
        _css = looks()
        title = traitlets.Unicode("").tag(sync=True)
        budget = traitlets.Float(0.0).tag(sync=True)
        top = traitlets.Float(0.0).tag(sync=True)  # the axis reaches at least these bytes
        small = traitlets.Bool(False).tag(sync=True)  # one of several, side by side
        appearance = traitlets.Dict(APPEARANCE).tag(sync=True)
        frame = traitlets.Bytes(b"").tag(sync=True)

    return MemoryView


def plain_text(title: str) -> str:
    """``text/plain`` of every output here. It never changes, since notebook tests compare it."""
    return joined("MemoryTracker plot", title)


class Scene(NamedTuple):
    """One picture on a page: a frame, its blocks (see ``encode_blocks``) and its own settings."""

    frame: bytes
    blocks: bytes
    settings: dict[str, Any]


def scene_of(timeline: Timeline | None, peak: MemorySnapshot | None, **settings) -> Scene:
    """The finished picture of ``timeline``; ``None``: nothing was measured."""
    return Scene(
        encode_frame(timeline, peak, None, finished=True), encode_blocks(timeline), settings
    )


def outline_of(beside: tuple[str, Timeline] | None) -> dict[str, Any] | None:
    """Another run as the setting of a picture."""
    if beside is None:
        return None
    title, timeline = beside
    shown = timeline.decimate(MAX_POINTS)
    return {"title": title, "op": shown.events, "totals": shown.totals}


def explorable_html(scenes: list[Scene], still: str, *, with_script: bool = True) -> str:
    """HTML that draws ``scenes`` side by side, to be explored without a kernel.

    ``still``: HTML for a page on which no script runs. ``with_script``: another output of the page
    may have the script already.
    """
    hosts = []
    for frame, blocks, own in scenes:
        settings = {"budget": 0, "top": 0, "small": False, "outline": None} | own
        settings["appearance"] = APPEARANCE
        hosts.append(
            f"<div data-gradmem-settings='{html.escape(json.dumps(settings))}' "
            f'data-gradmem-frame="{_in_text(gzip.compress(frame, mtime=0))}" '
            f'data-gradmem-blocks="{_in_text(blocks)}"></div>'
        )
    script = "window.gradmemDraw?.();"
    style = ""
    if with_script:
        script = f"(() => {{\n{drawing('page')}\n}})();"
        style = f"<style>{looks()}</style>"
    return (
        f'<div class="gm-explorable">{style}<div class="gm-row">{"".join(hosts)}'
        f'</div><div class="gm-still">{still}</div><script>{script}</script></div>'
    )


def _in_text(packed: bytes) -> str:
    return base64.b64encode(packed).decode()


_cell_with_script: str | None = None


def _is_script_due() -> bool:
    """Whether this output has to bring the script: those of the first cell that shows a picture do,
    each time that it runs. So a saved notebook has the script once. Without that cell, its pictures
    stand still until one is run again.
    """
    global _cell_with_script
    cell = cell_id()
    if cell is None:
        return True
    if _cell_with_script is None:
        _cell_with_script = cell
    return cell == _cell_with_script


class Moving:
    """The pictures of a tracked block, one for each rank that runs it: they move from ``start`` on,
    with each ``draw``, and stand still, to be explored, from ``stop`` on.

    Without widgets, or with ``GRADMEM_LIVE=0``, there are no views, and nothing shows before the
    end.
    """

    def __init__(
        self,
        title: str = "",
        budget: int | None = None,
        ranks: int = 1,
        beside: tuple[str, Timeline] | None = None,
    ):
        self.title, self.budget, self.beside = title, budget, beside
        self.titles, name = [title], title
        if ranks > 1:
            self.titles = [joined(f"rank {rank}", title, by=", ") for rank in range(ranks)]
            name = joined(title, f"{ranks} ranks", by=", ")
        self.text = plain_text(name)
        # What each rank has recorded at the end; None: it did not come so far.
        self.timelines: list[Timeline | None] = [None] * ranks
        self.views: list = []
        self._place = self._output = None

    def start(self) -> None:
        """Put the empty pictures on the page."""
        if not live():
            return
        from IPython.display import display
        from ipywidgets import HBox, Layout

        several = len(self.titles) > 1
        for title in self.titles:
            view = widget_class()(
                title=title,
                budget=float(self.budget or 0),
                small=several,
                frame=encode_frame(None, None, None),
                layout=Layout(flex="1 1 0%", min_width="195px"),
            )
            self.views.append(view)
        row = HBox(self.views, layout=Layout(flex_flow="row wrap")) if several else self.views[0]
        self._place = place(row, keep=True)
        shown = self._place.html(f"<em>{WAIT}</em>")
        data = {"text/html": shown, "text/plain": self.text}
        self._output = display(data, raw=True, display_id=True)

    def draw(self, rank: int, frame: bytes) -> None:
        """Draw the next frame of ``rank``, with all ranks on the scale of the largest."""
        for view in self.views:
            view.top = max(view.top, frame_peak(frame))
        if self.views:
            self.views[rank].frame = frame

    def stop(self, peak: MemorySnapshot | None = None) -> None:
        """Replace the moving pictures by the finished ones, and drop the widgets."""
        views, output, holder = self.views, self._output, self._place
        self.views, self._output, self._place = [], None, None
        try:
            data, metadata = self.bundle(peak)
            if output is not None:
                output.update(data, metadata=metadata, raw=True)
            else:
                show_bundle(data, metadata)
        finally:
            if holder is not None:
                for widget in [holder, holder.view, *views]:
                    widget.close()

    def bundle(self, peak: MemorySnapshot | None = None) -> tuple[dict, dict]:
        """The finished pictures as a mimebundle: to be explored, and still where no script runs.

        With ``GRADMEM_LIVE=0``, they are still everywhere. Without samples it says so in words.
        """
        highest = highest_of(self.timelines)
        if not highest:
            words = html.escape(describe(None, title=self.title))
            return {"text/html": f"<em>{words}</em>", "text/plain": self.text}, {}
        from .timeline_picture import plot_ranks, plot_timeline

        about: dict[str, Any] = {"title": self.title, "budget": self.budget}
        first, *others = self.timelines
        if first is not None and not others:
            picture = plot_timeline(first, peak=peak, beside=self.beside, **about)
        else:
            picture = plot_ranks(self.timelines, **about)
        picture.plain_text = self.text
        data, metadata = picture.bundle()
        if live_enabled():
            common: dict[str, Any] = {"budget": float(self.budget or 0), "top": float(highest)}
            common |= {"small": bool(others), "outline": outline_of(self.beside)}
            scenes = []
            for title, timeline in zip(self.titles, self.timelines, strict=True):
                scenes.append(scene_of(timeline, peak, **common, title=title))
            still = still_html((data, metadata), "")
            script = _is_script_due()
            data = {
                "text/html": explorable_html(scenes, still, with_script=script),
                "text/plain": self.text,
            }  # the still picture is in the HTML
            metadata = {}
        return data, metadata


class LivePlot(Moving):
    """The moving picture of one tracked block: ``start``, then ``push`` at most ten times a second,
    then ``finish``. Outside a notebook it does nothing.
    """

    def push(self, timeline: Timeline, current: MemorySnapshot) -> None:
        """Draw the next frame. All figures are bytes."""
        for view in self.views:
            view.frame = encode_frame(timeline, None, current)

    def finish(self, timeline: Timeline | None, peak: MemorySnapshot | None = None) -> None:
        """Replace the moving picture by a finished one."""
        if in_kernel():
            keep_own_lines()
            self.timelines = [timeline]
            self.stop(peak)


def show_timeline(
    timeline: Timeline,
    *,
    title: str = "",
    budget: int | None = None,
    peak: MemorySnapshot | None = None,
    beside: tuple[str, Timeline] | None = None,
) -> None:
    """Display a finished ``timeline`` as a view to explore, with the still picture in it.
    ``beside``: the title and the timeline of another run, drawn as an outline.

    With ``GRADMEM_LIVE=0``, it is a still picture. Outside a notebook, nothing is displayed.
    """
    if in_kernel():
        plot = Moving(title, budget, beside=beside)
        plot.timelines = [timeline]
        show_bundle(*plot.bundle(peak))
