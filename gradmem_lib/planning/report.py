"""What a plan says: the recipes that fit, fastest first, and why the others do not."""

import html
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from ..units import format_bytes
from .cards import Card
from .code import code
from .options import Option, RuledOut


@dataclass(frozen=True, eq=False)
class Plan:
    """What fits a card, fastest first by estimate, and what does not and why. Bytes everywhere.

    Attributes: ``fits`` (``Option``s, fastest first) and ``refused`` (``Option``s, by what they need) were predicted,
    ``ruled_out`` was not: weights, gradients and states alone are too much. ``advice``: where nothing fits, what would.
    """

    title: str
    card: Card
    seq_len: int | None
    global_batch: int
    method: str
    target: str
    fits: list[Option]
    refused: list[Option]
    ruled_out: list[RuledOut]
    advice: list[str]
    given: Any
    config: Any

    @property
    def best(self) -> Option | None:
        """The fastest option, ``None`` where nothing fits."""
        return self.fits[0] if self.fits else None

    @property
    def closest(self) -> Option:
        """``best``, or where nothing fits what needs least."""
        return self.best or self.refused[0]

    @property
    def next_faster(self) -> Option | None:
        """The slowest of the options that would be faster than ``best``, and do not fit."""
        faster = [o for o in self.refused if self.best and o.seconds < self.best.seconds]
        return max(faster, key=lambda o: o.seconds, default=None)

    @property
    def code(self) -> str:
        """Python that trains by ``best``; empty where nothing fits. ``train_dataset`` is yours."""
        return code(self.best, self.given, self.config, self.target) if self.best else ""

    def __str__(self) -> str:
        rows = f"{self.seq_len:,} tokens" if self.seq_len else "images"
        lines = [
            f"{self.title} on {self.card.name} ({self.card.nbytes:,} bytes), global batch {self.global_batch} x {rows}, "
            f"method {self.method}, target {self.target}",
            "",
        ]
        if self.fits:
            lines += [
                "Fits, fastest first. Times are estimates, from counted operations and bytes moved; of those within 10 %",
                "of each other, the recipe that changes training least comes first.",
                *_table(self.fits),
            ]
        else:
            lines += ["Nothing fits. Closest:", *_table([self.closest])]
            lines += ["", _wrapped(f"It {self.closest.why_not()}.")]
        lines += [_wrapped(line, "  * ") for line in self.advice]
        faster = self.next_faster
        if faster is not None:
            lines += ["", f"The next faster one does not fit: {faster}", _wrapped(f"It {faster.why_not()}.")]
        if self.ruled_out:
            lines += ["", "Ruled out without a prediction:"]
        for why in dict.fromkeys(out.why for out in self.ruled_out):
            kinds = "; ".join(str(out) for out in self.ruled_out if out.why == why)
            lines.append(_wrapped(f"{kinds}: {why}.", "  * "))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "model": self.title,
            "card": asdict(self.card),
            "seq_len": self.seq_len,
            "global_batch": self.global_batch,
            "method": self.method,
            "target": self.target,
            "fits": [o.to_dict() for o in self.fits],
            "refused": [o.to_dict() | {"why": o.why_not()} for o in self.refused],
            "ruled_out": [
                {"recipe": str(o), "needs_at_least": o.needs, "why": o.why} for o in self.ruled_out
            ],
            "closest": self.closest.to_dict(),
            "advice": self.advice,
            "code": self.code,
        }


def _table(options: list[Option]) -> list[str]:
    lines = [f"  {'us/token':>8} {'needs':>10} {'spare':>10}   recipe"]
    for o in options:
        spare = ("-" if o.spare < 0 else "") + format_bytes(abs(o.spare))
        lines.append(f"  {o.seconds * 1e6:8.2f} {format_bytes(o.needs):>10} {spare:>10}   {o}")
    return lines


def _wrapped(text: str, bullet: str = "  ") -> str:
    return textwrap.fill(text, 110, initial_indent=bullet, subsequent_indent=" " * len(bullet))
