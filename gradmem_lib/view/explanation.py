"""``explain``: what an out-of-memory error says, in sentences and in one bar.

The table of answers is ``error_rows``.
"""

from __future__ import annotations

import shutil
import textwrap
import traceback
from dataclasses import dataclass, field, replace

from ..measure.error_frames import Frame, frames_of, moment_of, own_line
from ..measure.error_text import ErrorText, read_error
from ..units import format_bytes
from .error_rows import NAMES, facts_of, figures_of, fill, rows_of, table
from .next_command import command_after, step_of, words_before
from .template import html_from

# (sign of the text bar, colour) of each part, in the order of the bar.
PARTS = {
    "allocated": ("#", "#234a8a"),
    "idle": ("=", "#f0893c"),
    "other": ("o", "#1b9880"),
    "context": ("c", "#1b9880"),
    "other_processes": ("x", "#bd2b52"),
    "outside": ("x", "#bd2b52"),
    "rest": ("?", "#7a5195"),
    "free": (".", "#b4bfcd"),
}
ASK = (
    "No out-of-memory error was found in this text. Give the line that contains the words "
    '"out of memory" ("CUDA out of memory. Tried to allocate ..."), and the lines from "Traceback" '
    "on, if there are any. For a process that was killed, give the lines of the launcher."
)

PAGE = """
<div>
  {% for sentence in found.sentences %}<p>{{ sentence }}</p>{% endfor %}
  {% if found.command %}<pre>{{ found.command }}</pre>{% endif %}
  {% if parts %}
    <div style='display:flex;height:34px;max-width:760px' role='img' aria-label='{{ words }}'>
      {% for name, nbytes in parts.items() %}
        <span style='flex:{{ nbytes }};background:{{ signs[name][1] }}'></span>
      {% endfor %}
    </div>
  {% endif %}
  {% if found.figures %}
    <table>
      {% for name, nbytes in found.figures.items() %}
        <tr>
          <td style='text-align:left'>
            {% set color = signs[name][1] if name in parts else "none" %}
            <span style='display:inline-block;width:12px;height:12px;background:{{ color }}'></span>
            {{ " " }}{{ names[name] }}
          </td>
          <td>{{ format_bytes(nbytes) }}</td>
        </tr>
      {% endfor %}
    </table>
  {% endif %}
  {% for note in found.notes %}<p>{{ note }}</p>{% endfor %}
</div>
"""


@dataclass(frozen=True)
class Explanation:
    """What the error says. ``figures``: bytes by name. ``cases``: which cases hold, the first one
    is the main one. ``sentences``: the answer, one for each thing to know. ``moment``: of the run,
    if a traceback shows it. ``command``: to type next. ``notes``: of the text itself.
    """

    error: ErrorText | None
    figures: dict[str, int] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    moment: str = ""
    own_line: Frame | None = None
    command: str = ""
    notes: tuple[str, ...] = ()

    def parts(self) -> dict[str, int]:
        """The bar: bytes by part, in the order of ``PARTS``."""
        found = {name: self.figures[name] for name in PARTS if self.figures.get(name)}
        if "context" in found or "other_processes" in found:
            found.pop("outside", None)
        return found

    def __str__(self) -> str:
        return self.to_text(_width())

    __repr__ = __str__

    def for_terminal(self) -> str:
        """The same with the command at the end, where it is still seen below a long answer."""
        if not self.command:
            return str(self)
        *answer, words = self.sentences
        above = replace(self, sentences=tuple(answer), command="").to_text(_width())
        return "\n".join([above, "", *_wrapped((words,), _width()), f"  {self.command}"])

    def to_text(self, width: int = 80) -> str:
        lines = [*_wrapped(self.sentences, width), f"  {self.command}".rstrip()]
        if self.figures:
            lines.append("")
            label = max(len(NAMES[name]) for name in self.figures)
            for name, nbytes in self.figures.items():
                lines.append(f"  {NAMES[name]:<{label}}  {format_bytes(nbytes):>10}")
        if self.parts():
            lines += ["", *_bar(self.parts(), width)]
        if self.notes:
            lines += ["", *_wrapped(self.notes, width)]
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        parts = self.parts()
        words = ", ".join(f"{NAMES[name]}: {format_bytes(n)}" for name, n in parts.items())
        return html_from(
            PAGE,
            found=self,
            parts=parts,
            signs=PARTS,
            words=words,
            names=NAMES,
            format_bytes=format_bytes,
        )


def _width() -> int:
    return min(100, max(40, shutil.get_terminal_size((80, 24)).columns))


def _wrapped(sentences: tuple[str, ...], width: int) -> list[str]:
    lines = []
    for sentence in sentences:
        lines += textwrap.wrap(sentence, width, break_long_words=False, break_on_hyphens=False)
    return lines


def _bar(parts: dict[str, int], width: int) -> list[str]:
    """One line of signs, and a line for each sign."""
    room = width - 4
    total = sum(parts.values())
    signs = ""
    reached = 0
    for name, nbytes in parts.items():
        reached += nbytes
        signs += PARTS[name][0] * (round(reached / total * room) - len(signs))
    legend = [
        f"  {PARTS[name][0]} {NAMES[name]}, {format_bytes(nbytes)}"
        for name, nbytes in parts.items()
    ]
    return [f" [{signs}]", *legend]


def explain(
    text: str | BaseException,
    *,
    model: str | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
) -> Explanation:
    """What an out-of-memory error says: the case with its figures, what helps, and what to type.

    ``text``: the message, a traceback, or a whole log with one; or the exception itself. It reads
    the messages of PyTorch for CUDA, ROCm, XPU, NPU and Apple's GPUs, those of libraries without
    figures, of the system that ended a process, and this course's ``BudgetExceeded``. A text
    without such an error gives an explanation that says which line is needed.

    ``model``, ``batch_size`` (rows) and ``seq_len`` (tokens in a row) are filled into the command
    that stands at the end. Without them, it has what the text shows of them.

    Raises ``TypeError`` for anything but a text or an exception.
    """
    if isinstance(text, BaseException):
        text = "".join(traceback.format_exception(text))
    if not isinstance(text, str):
        raise TypeError(f"explain was given {type(text).__name__}: give the error's text")
    error = read_error(text)
    if error is None:
        return Explanation(None, sentences=(ASK,), cases=("nothing found",))
    step = step_of(text)
    for name, given in (("model", model), ("rows", batch_size), ("tokens", seq_len)):
        if given is not None:
            step[name] = str(given)
    frames = frames_of(text, error)
    moment = moment_of(frames)
    own = own_line(frames)

    figures = figures_of(error)
    facts = facts_of(error, figures, moment, is_windows="\\" in text and ":\\" in text)
    rows = rows_of(error.kind, facts)
    sentences = [fill(f"{row.says} {row.helps}".strip(), facts) for row in rows]
    sentences += _moment_sentences(moment, own, bool(frames), rows[0].case)
    sentences.append(words_before(rows[0], step))
    return Explanation(
        error,
        figures,
        tuple(row.case for row in rows),
        tuple(sentences),
        moment,
        own,
        command_after(rows[0], error, step, own),
        tuple(_notes(error, bool(frames), rows[0].case)),
    )


# These do not come from a moment of a training step: it is neither asked for nor answered.
WITHOUT_MOMENT = ("dispatched", "disk", "killed", "open files", "shared memory", "vllm")


def _moment_sentences(moment: str, own: Frame | None, has_frames: bool, case: str) -> list[str]:
    if not has_frames:
        return []
    found = []
    where = ""
    if own is not None:
        where = f" Your own line: {own.file}, line {own.line}"
        if own.code:
            where += f": {own.code}"
        where += "."
    if case in WITHOUT_MOMENT:
        if where:
            found.append(where.strip())
        return found
    if moment:
        found.append(f"It happened in: {moment}.{where}")
    else:
        found.append(f"The traceback has no frame that shows the moment.{where}")
    what_helps = table()["moments"]
    if moment in what_helps and case != "host":
        found.append(what_helps[moment])
    return found


def _notes(error: ErrorText, has_frames: bool, case: str) -> list[str]:
    found = []
    if error.count > 1:
        which = "the first"
        if error.stream:
            which = f"the first, from {error.stream}"
        found.append(f"The text has {error.count} such errors; this is {which}.")
    if error.version:
        found.append(f"{error.version} writes this message.")
    if not has_frames and case not in WITHOUT_MOMENT:
        found.append(
            'There is no traceback in this text, so the moment is not known: the lines from "'
            'Traceback" on would show it.'
        )
    return found
