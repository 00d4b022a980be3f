"""Colours, hatches, scales and words that all pictures share. How they look is in
``picture.mplstyle``.

One palette serves every picture of the course. Its six colours differ in lightness by at least nine
steps of CIE L*, so they stay apart in greyscale and for colour-blind readers, and each category
also carries a hatch of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ..units import GiB, KiB, MiB, TiB, format_bytes

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
PHASE_LABELS = {"forward": "forward", "backward": "backward", "optimizer_step": "optimizer step"}
PHASE_COLORS = {"forward": "#dfe3ea", "backward": "#7b8495", "optimizer_step": "#262c38"}
MAX_POINTS = 400


@cache
def _settings():
    from matplotlib import rc_params_from_file

    path = Path(__file__).with_name("picture.mplstyle")
    return rc_params_from_file(path, use_default_template=False)


_one_draws = threading.RLock()


@contextmanager
def style():
    """The course's own matplotlib settings, independent of the reader's matplotlibrc."""
    import matplotlib.style  # here, since a plain script draws nothing

    # The settings are the process's, and a widget's changes may arrive on a thread of their own.
    with _one_draws, matplotlib.style.context(["default", _settings()]):
        yield


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


def reach_of(highest: int, budget: int | None) -> int:
    """The most bytes that a picture shows.

    A budget far above the run is left out, since it would flatten the picture.
    """
    if budget and budget <= 2.5 * highest:
        highest = max(highest, budget)
    return max(highest, 1)


def shortened(title: str, characters: int) -> str:
    """``title``, cut where it would run into what stands beside it."""
    return title if len(title) <= characters else title[: characters - 1].rstrip() + "…"


def joined(*words: str, by: str = ": ") -> str:
    """Words that may be empty, such as a title, with ``by`` between those that are not."""
    return by.join(filter(None, words))


def listed(parts: Mapping[str, int]) -> str:
    """Bytes by name in words, without those that are 0."""
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)


def filled(color: str, hatch: str) -> dict:
    """How matplotlib fills an area: the hatch in ink that reads on ``color``."""
    ink: object = INK
    if color != GROWING:
        ink = (1, 1, 1, 0.45) if is_dark(color) else (0.06, 0.08, 0.12, 0.30)
    return {"facecolor": color, "hatch": hatch, "edgecolor": ink, "linewidth": 0}


def look_of(name: str) -> dict:
    """How matplotlib fills a category's area."""
    return filled(COLORS[name], HATCHES[name])


def plate(color: str = DARK) -> dict:
    """How a label is drawn that may stand on any colour: light on a plate of ``color``."""
    box = {"boxstyle": "round,pad=0.22,rounding_size=0.3", "facecolor": color, "edgecolor": "none"}
    return {"color": LIGHT, "fontweight": "bold", "zorder": 7, "bbox": box}
