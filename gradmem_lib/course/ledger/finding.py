"""A finding: the figures that a claim's verdict is computed from, and the sentence that says it.

No verdict is written down anywhere. A claim is first judged in the setting of its own document
(``own``). If it fails there, it is judged under the condition that it needs (``where``); if it
holds there, in other settings that its words include (``elsewhere``). So "holds" alone is for what
needs no condition. Other figures that a reader should see, but that decide nothing, are ``beyond``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isnan

from ...units import MiB

# The verdicts, and the name of the sentence that goes with each in the text of a finding.
SENTENCE_OF = {"holds": "holds", "holds sometimes": "only if", "does not hold": "fails"}
VERDICTS = tuple(SENTENCE_OF)
SENTENCES = r"^ *(holds|only if|fails|why|needs): "  # how each begins in the text of a finding
Figures = dict[str, int | float | str]
MOST_SHOWN = 3  # figures beside a sentence that is read in ten seconds
GB = 10**9  # the documents' own unit
SIZES = {"GB": GB, "MB": MiB, "%": 0.01}
OTHER_SENTENCE = (
    "The figures found here differ from those that this entry was written for; read "
    "the figures, not the explanation."
)


def in_unit(value: float, unit: str) -> str:
    """``value`` as text. ``unit``: "GB" for bytes in powers of 1000, "MB" for bytes in MiB (as NVML
    writes them), "%" for a share, "×" for a ratio, "yes" for a truth value, or any other word
    behind a plain number.
    """
    if unit == "yes":
        return "yes" if value else "no"
    if unit == "GB":
        return f"{value / GB:,.{1 if value >= GB else 2}f} GB"
    if unit == "MB":
        return f"{value / MiB:,.0f} MB"
    if unit == "%":
        return f"{100 * value:.3g}%"
    if unit == "×":
        return f"{value:.{2 if value < 10 else 1}f}×"
    number = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def each(name: str, found: Mapping, shown: str = "{}") -> Figures:
    """A figure for each setting of ``found``, the values by setting.

    ``name`` has braces where the setting stands; None reads "off". ``shown``: how a value becomes
    text, or several at once. A number alone stays one.
    """
    figures: Figures = {}
    for setting, value in found.items():
        words = ["off" if word is None else word for word in _several(setting)]
        figures[name.format(*words)] = value if shown == "{}" else shown.format(*_several(value))
    return figures


def _several(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def gb(nbytes: float) -> str:
    """Bytes in the documents' own unit, powers of 1000."""
    return in_unit(nbytes, "GB")


def _read(claimed: str) -> tuple[list[float], str]:
    """The numbers of a claimed text, such as "60 GB", "4×" or "20 to 30%", and their unit; those in
    % as shares.
    """
    unit = re.search(r"[^\d ]*$", claimed)[0]
    numbers = re.findall(r"[\d.]+", claimed.replace(",", ""))
    return [float(number) * SIZES.get(unit, 1) for number in numbers], unit


@dataclass(frozen=True)
class Figure:
    """One number beside the claimed one; they agree where ``low`` <= ``found`` <= ``high``.

    ``what``: what was counted; ``claimed``: as the document has it; ``found``: computed, and
    written in ``unit``.
    """

    what: str
    claimed: str
    found: float
    low: float = -inf
    high: float = inf
    unit: str = ""

    def __post_init__(self) -> None:
        if isnan(self.found):
            raise ValueError(
                f"{self.what!r}: found is not a number, so that nothing can be judged by it"
            )

    @property
    def agrees(self) -> bool:
        return self.low <= self.found <= self.high

    @property
    def text(self) -> str:
        return in_unit(self.found, self.unit)


def about(what: str, claimed: str, found: float, within: float = 0.1) -> Figure:
    """A claimed number, met where ``found`` is at most the share ``within`` of it away."""
    (number,), unit = _read(claimed)
    room = number * within
    return Figure(what, claimed, found, number - room, number + room, unit)


def between(what: str, claimed: str, found: float, within: float = 0.0) -> Figure:
    """A claimed range, "80 to 90%" or "104 to 124 GB"; ``within``: how far beyond its ends is still
    "about" it, as a share of each.
    """
    (low, high), unit = _read(claimed)
    return Figure(what, claimed, found, low * (1 - within), high * (1 + within), unit)


def at_least(what: str, claimed: str, found: float) -> Figure:
    (low,), unit = _read(claimed)
    return Figure(what, f"at least {claimed}", found, low=low, unit=unit)


def fits(what: str, claimed: str, room: int, found: float) -> Figure:
    """Bytes of which the document says ``claimed``, "to fit 80 GB", of a card that has ``room``
    bytes.
    """
    return Figure(what, claimed, found, high=room, unit="GB")


def more(what: str, found: float, unit: str = "×", than: float = 1.0) -> Figure:
    """Claimed to be more than ``than``; a thousandth counts."""
    return Figure(what, "more", found, low=than * 1.001, unit=unit)


def less(what: str, found: float, unit: str = "×", than: float = 1.0) -> Figure:
    """Claimed to be less than ``than``; a thousandth counts."""
    return Figure(what, "less", found, high=than * 0.999, unit=unit)


def some(what: str, found: float) -> Figure:
    """A share that is claimed to be there; a hundredth counts."""
    return Figure(what, "some", found, low=0.01, unit="%")


def none(what: str, found: float, unit: str = "") -> Figure:
    """Claimed to be 0."""
    return Figure(what, "none", found, high=0, unit=unit)


def yes(what: str, found: bool) -> Figure:
    """Something that is claimed to be so."""
    return Figure(what, "yes", found, low=1, high=1, unit="yes")


@dataclass(frozen=True)
class Finding:
    """The answer to a claim.

    ``own``, ``where``, ``elsewhere``, ``beyond``: a figure or a tuple of them, three in all; all
    but the last decide.
    ``says``: a text with a sentence for each verdict that can be met, "holds: …", "only if: …",
    which goes on after "Holds only if", and "fails: …"; "why: …", what explains it; and "needs: …",
    what the answer needs beyond a CPU. Each begins a line. ``figures``: all else that was computed,
    bytes unless the name says otherwise.
    """

    own: Figure | tuple[Figure, ...]
    where: Figure | tuple[Figure, ...] = ()
    elsewhere: Figure | tuple[Figure, ...] = ()
    beyond: Figure | tuple[Figure, ...] = ()
    says: str = ""
    figures: Figures = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("own", "where", "elsewhere", "beyond"):
            object.__setattr__(self, name, _several(getattr(self, name)))
        if not self.own:
            raise ValueError(
                "own=() leaves nothing to judge by: give at least one Figure of the claim's "
                "own setting"
            )
        if len(self.shown) > MOST_SHOWN:
            raise ValueError(
                f"{len(self.shown)} figures are too many to read at a glance: keep "
                f"{MOST_SHOWN}, and put the others in figures"
            )

    @property
    def shown(self) -> tuple[Figure, ...]:
        return (*self.own, *self.where, *self.elsewhere, *self.beyond)

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``: true in its own setting and elsewhere; true under a condition; or
        neither.
        """
        if all(figure.agrees for figure in self.own):
            everywhere = all(figure.agrees for figure in self.elsewhere)
            return "holds" if everywhere else "holds sometimes"
        if self.where and all(figure.agrees for figure in self.where):
            return "holds sometimes"
        return "does not hold"

    def said(self, name: str) -> str:
        """What ``says`` has behind "holds: ", "why: " or another of these names, or nothing."""
        parts = re.split(SENTENCES, self.says, flags=re.MULTILINE)
        sentences = dict(zip(parts[1::2], parts[2::2], strict=True))
        return " ".join(sentences.get(name, "").split())

    @property
    def summary(self) -> str:
        """The sentence that goes with the verdict, or one that says that there is none."""
        return self.said(SENTENCE_OF[self.verdict]) or OTHER_SENTENCE

    @property
    def opening(self) -> str:
        """How the sentence begins: with the verdict, or with "Holds only if" before a condition."""
        if self.verdict == "holds sometimes" and self.said("only if"):
            return "Holds only if"
        return self.verdict.capitalize()

    @property
    def sentence(self) -> str:
        """Opening and summary in one: a condition goes on, and so does a summary in lower case."""
        goes_on = self.opening.endswith("if") or self.summary[0].islower()
        return f"{self.opening}{' ' if goes_on else '. '}{self.summary}"
