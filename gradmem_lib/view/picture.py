"""A picture: one matplotlib figure, which a notebook shows as a PNG and an explorer as an SVG.

Every picture is drawn once, on this sheet. Places on it are fractions of its width, and inches from
its top.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from ..display import live_enabled
from ..names import CATEGORIES
from ..units import format_bytes
from .place import show_bundle, still_html
from .style import INK, look_of, style
from .svg import frame, pattern

_DPI = 160
BESIDE, RIGHT = 0.772, 0.985  # of what stands to the right of the axes


def _has_hatch(artist: Artist) -> bool:
    """Whether it is a filled area with signs."""
    is_filled = hasattr(artist, "get_facecolor") and np.size(artist.get_facecolor())
    return bool(hasattr(artist, "get_hatch") and artist.get_hatch() and is_filled)


class Picture(Figure):
    """A figure that shows itself in a notebook, without pyplot.

    ``alt``: the picture in words, for those who do not see it. ``text``: its ``text/plain``, which
    must be the same on every computer, since notebook tests compare it.
    """

    def __init__(
        self, width: float, height: float, title: str = "", *, alt="", text="Memory figure"
    ):
        """``width`` and ``height`` are inches, of 100 CSS pixels."""
        super().__init__(figsize=(width, height), facecolor="none")
        self.alt, self.plain_text = alt, text
        self.write(0.012, 0.22, title, fontsize=11, fontweight="bold")

    def write(self, x: float, y: float, words: str, **look):
        """Write ``words`` from ``x`` on, or up to ``x`` with ``ha="right"``; ``y`` is their
        middle.
        """
        return self.text(x, 1 - y / self.get_figheight(), words, va="center_baseline", **look)

    def panel(self, left: float, right: float, top: float, bottom: float, **more) -> Axes:
        """Axes in this part of the sheet."""
        height = self.get_figheight()
        box = (left, 1 - bottom / height, right - left, (bottom - top) / height)
        return self.add_axes(box, **more)

    def write_peak(self, nbytes: int, words: str, more: str = "") -> None:
        """The peak in large letters at the top right."""
        self.write(BESIDE, 0.22, "peak")
        self.write(RIGHT, 0.22, format_bytes(nbytes), ha="right", fontsize=11, fontweight="bold")
        self.write(BESIDE, 0.42, more, fontsize=6.8)
        self.write(RIGHT, 0.42, words, ha="right", fontsize=6.8)

    def entry(self, x: float, y: float, words: str, look: dict, value: str = "") -> None:
        """An entry of a legend: a box, words, and a value at the right."""
        height, tall = self.get_figheight(), 0.13  # inches
        corner = (x, 1 - (y + tall / 2) / height)
        look = look | {"hatch": 2 * look.get("hatch", "")}  # a small box needs denser signs
        box = Rectangle(corner, 0.022, tall / height, transform=self.transFigure, **look)
        self.add_artist(box)
        self.write(x + 0.031, y, words, fontsize=8)
        self.write(RIGHT, y, value, ha="right", fontsize=8)

    def legend_beside(
        self, y: float, step: float, rows: list[tuple[str, dict, str]], title: str = ""
    ) -> float:
        """A legend at the right, below its ``title`` at ``y``; each row is (words, look, value).
        Returns the last row's place.
        """
        self.write(RIGHT, y, title, ha="right", fontsize=7.5)
        for words, look, value in rows:
            y += step
            self.entry(BESIDE, y, words, look, value)
        return y

    def categories(self, left: float, y: float) -> None:
        """A legend of all categories, in one row."""
        for number, name in enumerate(CATEGORIES):
            self.entry(left + number * (1 - left) / len(CATEGORIES), y, name, look_of(name))

    def png(self) -> bytes:
        """The same bytes for the same picture, and few, since notebooks are kept in git."""
        raw, packed = io.BytesIO(), io.BytesIO()
        with style():
            self.savefig(raw, format="png", dpi=_DPI, metadata={"Software": None})
        # A flat drawing needs few colours; without dithering, equal pixels stay equal.
        image = Image.open(raw).quantize(
            96, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )
        image.save(packed, format="PNG", optimize=True)
        return packed.getvalue()

    def svg(self, title: str) -> str:
        """An inline ``<svg>`` in the page's own colours, which shrinks with the page. ``title`` and
        ``alt`` are read out.
        """
        key = "gm" + hashlib.sha1((title + self.alt).encode()).hexdigest()[:8]
        hatched = [artist for artist in self.findobj(_has_hatch)]
        signs = [artist.get_hatch() for artist in hatched]
        hatches = {}
        for artist, sign in zip(hatched, signs, strict=True):
            hatches[to_hex(np.atleast_2d(artist.get_facecolor())[0])] = sign
        drawn = io.StringIO()
        try:
            for artist in hatched:
                artist.set_hatch(None)  # matplotlib's own patterns take 50 KB each
            with style(), matplotlib.rc_context({"svg.hashsalt": key}):
                self.savefig(drawn, format="svg")
        finally:
            for artist, sign in zip(hatched, signs, strict=True):
                artist.set_hatch(sign)
        shapes = drawn.getvalue()
        shapes = shapes[shapes.index('<g id="figure_1">') :].replace("xlink:", "")
        # a line of a notebook's file, not thousands; a space that does not break stays
        shapes = re.sub(r"[ \n]+", " ", shapes)
        shapes = shapes.replace(INK, "currentColor")
        shapes = re.sub(r' id="[\w.]+_\d+"', "", shapes)  # which another picture has too
        shapes = re.sub(r"(\.\d\d)\d\d+", r"\1", shapes)  # a hundredth of a point is enough
        shapes = shapes.replace("font-family: 'DejaVu Sans'", "font-family: inherit")
        patterns = ""
        for number, (color, hatch) in enumerate(hatches.items()):
            patterns += pattern(f"{key}h{number}", color, hatch)
            shapes = shapes.replace(f'fill: {color}"', f'fill: url(#{key}h{number})"')
        width, height = 72 * self.get_size_inches()
        read = {"title": title, "words": self.alt}
        return frame(key, width, height, 11, defs=patterns, scale=1 / 0.72, **read) + shapes

    def bundle(self) -> tuple[dict, dict]:
        """This picture as an output of a notebook: (data, metadata).

        Converters read its words in the metadata, and JupyterLab does not. So a notebook at work
        also gets the picture as HTML with these words. Notebooks that are built
        (``GRADMEM_LIVE=0``) have the PNG alone, which every viewer shows.
        """
        data = {"image/png": base64.b64encode(self.png()).decode(), "text/plain": self.plain_text}
        width, height = 100 * self.get_size_inches()
        about: dict[str, int | str] = {"width": round(width), "height": round(height)}
        if self.alt:
            about["alt"] = self.alt
        metadata = {"image/png": about}
        if self.alt and live_enabled():
            data["text/html"] = still_html((data, metadata), "")
        return data, metadata

    def _repr_mimebundle_(self, include=None, exclude=None, **kwargs):
        return self.bundle()

    def display(self) -> None:
        """Show the picture in a notebook, as an output of its own."""
        show_bundle(*self.bundle())
