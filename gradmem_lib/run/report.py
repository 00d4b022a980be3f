"""What was found in a run, as text for the terminal and as one HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..measure.budget import BudgetExceeded
from ..measure.cause import in_words
from ..measure.causes_of_growth import GROWTH
from ..measure.diagnosis import Diagnosis
from ..measure.timeline import Holder, MemorySnapshot, Timeline
from ..units import format_bytes
from ..view.diagnosis import diagnose
from ..view.live import explorable_html, scene_of
from ..view.timeline import describe
from .host import Host
from .steps import StepPeak, in_rows
from .tracking import ScriptTracker

SHOWN_HOLDERS, SHOWN_STEPS = 40, 40

# The page asks for nothing from outside, and the browser holds it to that.
CONTENT_RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
STYLE = """
:root { color-scheme: light dark; --faint: #80889650; }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 900px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
h3 { font-size: 1rem; margin-bottom: 0; }
h3 ~ p, h3 ~ ul { margin: .25rem 0; }
h3 ~ div, div.wide + p { margin-top: 1rem; }
pre { font-size: .875rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.columns { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .15rem .75rem .15rem 0; text-align: left; white-space: nowrap; }
th { border-bottom: 1px solid var(--faint); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True)
class Group:
    """Storages that one line of the script has made, of one category. ``example``: the largest."""

    example: Holder
    count: int
    nbytes: int


@dataclass(frozen=True)
class Report:
    """``ended``: a sentence on how the measurement ended, or nothing. ``failed``: an error ended it
    that memory is not to blame for. ``error``: what an out-of-memory error says, or nothing.
    """

    title: str
    budget: int | None
    steps: int
    device: str
    allocator: dict[str, int] | None
    diagnosis: Diagnosis
    timeline: Timeline
    moment_peaks: dict[str, int]
    step_peaks: Sequence[StepPeak]
    groups: Sequence[Group]
    notes: Sequence[str]
    host: Host
    growing_graph: str = ""
    ended: str = ""
    failed: bool = False
    error: str = ""

    @classmethod
    def of(
        cls,
        tracker: ScriptTracker,
        title: str,
        *,
        ended: str,
        failed: bool,
        error: str,
        ended_by: BaseException | None = None,
    ) -> Report:
        measured: ScriptTracker | BudgetExceeded = tracker
        holders = tracker.holders()
        if isinstance(ended_by, BudgetExceeded) and ended_by.snapshot.total < tracker.peak.total:
            # The script has survived the highest moment, and not this one.
            measured, holders = ended_by, ended_by.everything
        return cls(
            title=title,
            budget=tracker.budget,
            steps=tracker.steps,
            device=str(tracker.device),
            allocator=tracker.allocator,
            diagnosis=diagnose(measured),
            timeline=tracker.timeline,
            moment_peaks=tracker.moment_peaks,
            step_peaks=tracker.step_peaks,
            groups=grouped(holders),
            notes=tracker.notes,
            host=tracker.host,
            growing_graph=tracker.growing_graph,
            ended=ended,
            failed=failed,
            error=error,
        )

    @property
    def peak(self) -> MemorySnapshot:
        return self.diagnosis.peak

    @property
    def headline(self) -> str:
        steps = f"{self.steps:,} optimizer step{'s' * (self.steps != 1)}"
        words = f"{steps}, bytes of the {self.device.upper()} counted."
        return f"{words} {self.ended}".rstrip()

    @property
    def failed_early(self) -> bool:
        """Whether the script has failed in its first forward, or right after it."""
        facts = self.diagnosis.facts
        finished = [done for done in facts.forwards if done.live_after]
        has_trained = self.steps > 0 or facts.had_backward
        return self.failed and not has_trained and len(finished) <= 1

    def by_category(self) -> list[tuple[str, int]]:
        found = [(name, n) for name, n in self.peak.by_category.items() if n]
        return sorted(found, key=lambda pair: -pair[1])

    def by_moment(self) -> list[tuple[str, int]]:
        """The highest number of live bytes in each moment that occurred."""
        return sorted(self.moment_peaks.items(), key=lambda pair: -pair[1])

    def next_thing(self) -> str:
        """The first thing to do, in a sentence; empty if there is nothing."""
        if self.failed_early:
            return (
                "Next: fix the error. It came before the first training step, so what this step "
                "will need was not seen."
            )
        causes, helps = self.diagnosis.causes, self.diagnosis.helps
        if causes:
            first = causes[0]
            size = format_bytes(first.nbytes)
            words = f'Next: take away the first cause ("{first.name}"), {size} of the peak.'
            return f"{words} {first.limit}".rstrip()
        if helps:
            at_best = format_bytes(self.diagnosis.lowest[helps[0]])
            return f"Next: {helps[0]}, which can lower the peak to {at_best} at best."
        return ""

    def text(self) -> str:
        step = ""
        if self.steps and not self.diagnosis.facts.outside_of_training:
            step = f", in step {self.peak.step + 1:,}"
        lines = [
            f"gradmem run {self.title}: {self.headline}",
            *self._growth(),
            self.diagnosis.peak_line() if self.failed_early else str(self.diagnosis),
            self.next_thing(),
            f"The peak by category ({format_bytes(self.peak.total)}{step}):",
            *_aligned(self.by_category()),
            "The highest of each moment:",
            *_aligned(self.by_moment()),
            *self._more(),
        ]
        return "\n".join(line for line in lines if line)

    def html(self) -> str:
        settings = {"title": "Live bytes by category", "budget": float(self.budget or 0)}
        scene = scene_of(self.timeline, self.peak, **settings)
        words = escape(describe(self.timeline, title=self.title, budget=self.budget))
        picture = explorable_html([scene], words)
        categories = _table(("category at the peak", "*bytes"), _sizes(self.by_category()))
        moments = _table(("highest of each moment", "*bytes"), _sizes(self.by_moment()))
        more = "\n".join(self._more())
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_RULES}">\n'
            f"<title>gradmem run: {escape(self.title)}</title><style>{STYLE}</style></head><body>\n"
            f"<h1>Memory of {escape(self.title)}</h1><p>{escape(self.headline)}</p>\n"
            f"{picture}\n"
            f"<h2>Why, and what to do</h2>{self._causes()}{self._techniques()}\n"
            f"<p>{escape(self.next_thing())}</p><pre>{escape(more)}</pre>\n"
            f'<h2>The peak</h2><div class="columns">{categories}{moments}</div>\n'
            f"<h2>Step by step</h2>{self._steps()}\n"
            f"<h2>The storages at the peak, by the line that made them</h2>{self._holders()}\n"
            "</body></html>\n"
        )

    def _growth(self) -> list[str]:
        """What grows beside the counted tensors, or without a byte of them."""
        found = [self.host.growth()]
        if GROWTH not in [cause.name for cause in self.diagnosis.causes]:
            found.append(self.growing_graph)
        return [words for words in found if words]

    def _more(self) -> list[str]:
        """The allocator's figures, an error that was read, and notes."""
        lines = self.host.words()
        if self.allocator:
            figures = [f"{name} {format_bytes(n)}" for name, n in self.allocator.items()]
            lines.append(f"The allocator's own figures: {', '.join(figures)}.")
        if self.error:
            lines.append(f"What the error says:\n{self.error}")
        lines += [f"Note: {note}." for note in self.notes]
        return lines

    def _causes(self) -> str:
        words = " ".join((*self._growth(), self.diagnosis.peak_line()))
        parts = [f"<p>{escape(words)}</p>"]
        causes = self.diagnosis.causes
        if self.failed_early:
            causes = []
        for cause in causes:
            lines = "".join(f"<li><code>{escape(str(line))}</code>" for line in cause.lines)
            held = f"Held by <code>{escape(cause.held)}</code>." if cause.held else ""
            parts.append(
                f"<h3>{escape(cause.name)}</h3><p>{_sentence(cause.evidence)} {held}</p>"
                f"<ul>{lines}</ul>"
                f"<p><b>Remedy:</b> {_sentence(cause.remedy)} {escape(cause.limit)}</p>"
            )
        return "\n".join(parts)

    def _techniques(self) -> str:
        diagnosis, parts = self.diagnosis, []
        if self.failed_early:
            return ""
        if diagnosis.helps:
            rows = [(name, format_bytes(diagnosis.lowest[name])) for name in diagnosis.helps]
            heads = ("what can lower it, the cheapest first", "*at best to")
            parts.append(_table(heads, rows))
        if diagnosis.cannot_help:
            parts.append(f"<p>What cannot: {escape('; '.join(diagnosis.cannot_help))}.</p>")
        return "\n".join(parts)

    def _steps(self) -> str:
        rows = []
        for peak in in_rows(list(self.step_peaks), SHOWN_STEPS):
            sizes = format_bytes(peak.total), format_bytes(peak.live_after)
            rows.append((peak.words, sizes[0], peak.moment, sizes[1]))
        return _table(("step", "*peak", "in", "*live at its end"), rows)

    def _holders(self) -> str:
        rows = []
        for group in self.groups[:SHOWN_HOLDERS]:
            holder = group.example
            rows.append(
                (
                    format_bytes(group.nbytes),
                    str(holder.line or ""),
                    holder.category,
                    f"{group.count:,}",
                    holder.module,
                    in_words(holder),
                    str(holder.held or ""),
                )
            )
        heads = ("*bytes", "made at", "category", "*storages")
        of_the_largest = ("the largest is of", "its tensor", "held by")
        table = _table((*heads, *of_the_largest), rows)
        rest = self.groups[SHOWN_HOLDERS:]
        if rest:
            nbytes = sum(group.nbytes for group in rest)
            table += f"<p>{len(rest):,} more lines have {format_bytes(nbytes)} together.</p>"
        return table


def grouped(holders: Iterable[Holder]) -> list[Group]:
    """The holders by line and category, the largest sum first. What no line has made, such as the
    weights that were there before, is one group a category.
    """
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in holders:
        kinds[holder.category, holder.line].append(holder)
    groups = []
    for alike in kinds.values():
        largest = max(alike, key=lambda holder: holder.nbytes)
        groups.append(Group(largest, len(alike), sum(holder.nbytes for holder in alike)))
    return sorted(groups, key=lambda group: -group.nbytes)


def _sizes(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    return [(name, format_bytes(n)) for name, n in pairs]


def _aligned(pairs: Iterable[tuple[str, int]]) -> list[str]:
    return [f"  {name:<24} {size:>12}" for name, size in _sizes(pairs)]


def _sentence(text: str) -> str:
    """A text as HTML that begins with a capital letter."""
    return escape(text[:1].upper() + text[1:])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table. A head that begins with ``*`` is of a column of numbers."""
    kinds = [' class="number"' if head.startswith("*") else "" for head in heads]
    lines = ["<tr>"]
    for kind, head in zip(kinds, heads, strict=True):
        lines.append(f"<th{kind}>{escape(head.lstrip('*'))}")
    for row in rows:
        lines.append("<tr>")
        for kind, cell in zip(kinds, row, strict=True):
            lines.append(f"<td{kind}>{escape(cell)}")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
