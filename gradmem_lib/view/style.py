"""Colours, hatches, scales and figures that all pictures share."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..display import live_enabled
from ..names import CATEGORIES
from ..units import GiB, KiB, MiB, TiB, format_bytes
from .place import still_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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

# The band of bytes that grow, at the foot of a stack, whatever their categories are: lines in INK
# on the page itself, since a white band glares on a dark page.
GROWING, GROWING_HATCH = "none", "||"

# A picture has no background, so its words and lines have a tone that reads on light and dark:
# INK has a contrast of 4.5 with white, and of 4.2 with JupyterLab's and GitHub's dark background.
INK, ALARM = "#6f7787", "#d84a42"
GRID = "#80889650"
# On the colours of a picture: lines between areas, and the plates under labels.
LIGHT, DARK = "#ffffff", "#39414f"
MAX_POINTS = 400
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "hatch.linewidth": 0.6,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "savefig.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
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


def draw_quiet_axes(ax: Axes) -> None:
    """Faint lines for the values, a frame at the bottom only, and small labels."""
    ax.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(INK)
    ax.tick_params(colors=INK, length=3, width=0.7, labelsize=8)
    ax.tick_params(axis="y", length=0)


def nice_step(span: float, parts: int = 4) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that cuts ``span`` into about ``parts``."""
    wanted = max(span, 1e-9) / parts
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(power * f for f in (1, 2, 5, 10) if power * f >= wanted * 0.8)


def reach_of(highest: int, budget: int | None) -> int:
    """The most bytes that a picture shows.

    A budget far above the run is left out, since it would flatten the picture.
    """
    if budget and budget <= 2.5 * highest:
        highest = max(highest, budget)
    return max(highest, 1)


def axis_top(highest: int, budget: int | None) -> int:
    """Bytes at the upper end of the axis."""
    return round(reach_of(highest, budget) * 1.08)


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG file: the same bytes for the same picture, and small, since notebooks are
    kept in git.
    """
    from PIL import Image

    raw, packed = io.BytesIO(), io.BytesIO()
    with style():
        figure.savefig(raw, format="png", dpi=_DPI, metadata={"Software": None}, facecolor="none")
    # A flat drawing needs few colours; without dithering, equal pixels stay equal.
    image = Image.open(raw).quantize(96, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.save(packed, format="PNG", optimize=True)
    return packed.getvalue()


def shortened(title: str, characters: int) -> str:
    """``title``, cut where it would run into what stands beside it."""
    return title if len(title) <= characters else title[: characters - 1].rstrip() + "…"


def joined(*words: str, by: str = ": ") -> str:
    """Words that may be empty, such as a title, with ``by`` between those that are not."""
    return by.join(filter(None, words))


def listed(parts: Mapping[str, int]) -> str:
    """Bytes by name in words, without those that are 0."""
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)


def display_size(figure: Figure) -> dict[str, int]:
    """Width and height, in CSS pixels, at which ``png(figure)`` is meant to be shown."""
    width, height = figure.get_size_inches()
    return {"width": round(width * 100), "height": round(height * 100)}


def picture_bundle(figure: Figure, alt: str, text: str) -> tuple[dict, dict]:
    """A still figure as an output of a notebook: (data, metadata).

    ``alt``: the picture in words, for those who do not see it. ``text``: its ``text/plain``, which
    must be the same on every computer, since notebook tests compare it.

    Converters read the words in the metadata, and JupyterLab does not. So a notebook at work also
    gets the picture as HTML with these words. Notebooks that are built (``GRADMEM_LIVE=0``) have
    the PNG alone, which every viewer shows.
    """
    data = {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": text}
    about = dict[str, int | str](display_size(figure))
    if alt:
        about["alt"] = alt
    metadata = {"image/png": about}
    if alt and live_enabled():
        data["text/html"] = still_html((data, metadata), "")
    return data, metadata


def show_bundle(data: dict, metadata: dict) -> None:
    """Display an output such as ``picture_bundle`` makes."""
    from IPython.display import display

    display(data, metadata=metadata, raw=True)


@contextmanager
def style():
    """The course's own matplotlib settings, independent of the reader's matplotlibrc."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcParams.update(
            {k: v for k, v in matplotlib.rcParamsDefault.items() if k not in _KEEP_RC}
        )
        matplotlib.rcParams.update(_RC)
        yield


_KEEP_RC = {
    "backend",
    "backend_fallback",
    "interactive",
    "toolbar",
    "timezone",
    "datapath",
    "webagg.address",
}


def new_figure(width: float, height: float, alt: str = "") -> Figure:
    """``alt``: the picture in words, for those who do not see it."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that shows itself in a notebook, without pyplot."""

        def _repr_mimebundle_(self, include=None, exclude=None, **kwargs):
            return picture_bundle(self, alt, "Memory figure")

    return Picture(figsize=(width, height), dpi=100, facecolor="none")


def hatch_ink(color: str):
    if color == GROWING:
        return INK
    return (1, 1, 1, 0.45) if is_dark(color) else (0.06, 0.08, 0.12, 0.30)


def plate(color: str = DARK) -> dict:
    """How a label is drawn that may stand on any colour: light on a plate of ``color``."""
    box = {"boxstyle": "round,pad=0.22,rounding_size=0.3", "facecolor": color, "edgecolor": "none"}
    return {"color": LIGHT, "bbox": box}


def label_peak(
    ax: Axes, at: tuple[float, float], nbytes: int, *, on_left: bool, offset: tuple[float, float]
) -> None:
    """Write ``peak 1.2 MiB`` beside the peak's point, ``offset`` points away from it.

    ``on_left``: to the left of the point, where the right side has no room.
    """
    across, up = offset
    ax.annotate(
        f"peak {format_bytes(nbytes)}",
        at,
        xytext=(-across if on_left else across, up),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="bottom",
        fontsize=8.5,
        fontweight="bold",
        zorder=7,
        **plate(),
    )


def look_of(name: str) -> dict:
    """How matplotlib fills a category's bar."""
    color = COLORS[name]
    return {"color": color, "hatch": HATCHES[name], "edgecolor": hatch_ink(color), "linewidth": 0}


def draw_stack(
    ax: Axes, y: float, height: float, parts: Mapping[str, int], factor: int, **more
) -> None:
    """Draw a bar from 0 on: the bytes of ``parts`` by category, one behind another. ``factor``: the
    bytes in the axis's unit.
    """
    left = 0.0
    for name in CATEGORIES:
        width = parts.get(name, 0) / factor
        if width:
            ax.barh(y, width, height, left=left, **look_of(name), **more)
            left += width


def draw_entry(
    figure: Figure,
    words: str,
    at: tuple[float, float],
    size: tuple[float, float],
    indent: float,
    look: tuple[str, str] | None = None,
) -> None:
    """Draw an entry of a legend: a box to the right of ``at``, centred on its height, and words
    that begin ``indent`` behind ``at``, all in fractions of the figure's size.

    ``look``: colour and hatch; without it, those of the category ``words``.
    """
    from matplotlib.patches import Rectangle

    x, y = at
    color, hatch = look or (COLORS[words], HATCHES[words])
    box = Rectangle(
        (x, y - size[1] / 2),
        *size,
        transform=figure.transFigure,
        facecolor=color,
        hatch=hatch * 2,
        edgecolor=hatch_ink(color),
        linewidth=0,
    )
    figure.add_artist(box)
    figure.text(x + indent, y, words, va="center_baseline", fontsize=8.5)
