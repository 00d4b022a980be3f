"""Shared parts of the inline SVGs: a frame with words for those who do not see it, and hatches."""

from __future__ import annotations

from html import escape

from .place import LEAST_OF_WIDTH
from .style import COLORS, HATCHES, is_dark

_MARKS = {
    "": "",
    "/": '<path d="M-2 2L2 -2M0 8L8 0M6 10L10 6"/>',
    "\\": '<path d="M-2 6L2 10M0 0L8 8M6 -2L10 2"/>',
    "-": '<path d="M0 4H8"/>',
    ".": '<path d="M2 2h.01M6 6h.01" stroke-width="2" stroke-linecap="round"/>',
    "x": '<path d="M0 0L8 8M0 8L8 0"/>',
}


def svg_pattern(key: str, name: str) -> str:
    """A category's colour and hatch, as a ``<pattern>`` that boxes are filled with."""
    return pattern(key + name, COLORS[name], HATCHES[name])


def pattern(id: str, color: str, hatch: str) -> str:
    """A ``<pattern>`` in ``color`` with the signs of ``hatch``, in ink that reads on it."""
    ink = 'stroke="#10141c" stroke-opacity=".3"'
    if is_dark(color):
        ink = 'stroke="#fff" stroke-opacity=".45"'
    return (
        f'<pattern id="{id}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{color}"/><g {ink} fill="none">{_MARKS[hatch[:1]]}</g>'
        "</pattern>"
    )


def frame(
    key: str,
    width: float,
    height: float,
    font: int,
    *,
    title: str,
    words: str,
    defs: str = "",
    scale: float = 1,
) -> str:
    """The start of an ``<svg>`` that follows the page's colours and shrinks with it, as far as its
    words can be read; ``title`` and ``words`` are read out. ``scale``: pixels for one of its units,
    where there is room.
    """
    wide = scale * width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{key}t {key}d" '
        f'viewBox="0 0 {width:g} {height:g}" '
        f'style="width:100%;min-width:{LEAST_OF_WIDTH * wide:g}px;max-width:{wide:g}px;height:auto;'
        "display:block;color:inherit;"
        f'font:{font}px var(--jp-ui-font-family,system-ui,sans-serif)">'
        f'<title id="{key}t">{escape(title)}</title><desc '
        f'id="{key}d">{escape(words)}</desc><defs>{defs}</defs>'
    )
