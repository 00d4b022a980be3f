"""Commit to a number before the cell shows it: a guess, then guess, formula and measured value side
by side.
"""

from __future__ import annotations

import ast
import html
import math
import operator
import re
from typing import Any

from ...display import in_kernel
from ...units import format_bytes, parse_bytes
from . import progress

_LONGEST = 10**15  # from here on, digits tell less than a power of ten does


def predict_first(id: str, question: str, *, unit: str = "bytes") -> Guess:
    """Ask for a guess and return at once. In a notebook this shows a small input; elsewhere, how to
    guess in code.

    ``unit`` is "bytes", which accepts "1.5 GiB", "600e6" or 42, or any other word, which accepts
    plain numbers. A guess made earlier under the same ``id`` is remembered.
    """
    asked = Guess(id, question, unit=unit)
    _display(asked)
    return asked


class Guess:
    """A question with a number for an answer.

    ``value`` is the guess, in ``unit``, or ``None`` while there is none.
    """

    def __init__(self, id: str, question: str, *, unit: str = "bytes"):
        self.id, self.question, self.unit = id, question, unit
        remembered = progress.load()["guesses"].get(id, {})
        self.value: float | None = (
            remembered.get("guess") if remembered.get("unit") == unit else None
        )
        self.output: Any = None  # the notebook's output with the input, once it is shown

    def __repr__(self) -> str:
        return f"Prediction {self.id}"

    def guess(self, value: float | str) -> None:
        """Commit to ``value``, such as ``"1.5 GiB"``, ``"600e6"`` or ``42``.

        Raises ``ValueError`` with advice.
        """
        print(self.commit(value))

    def reveal(
        self, *, formula: float | None = None, measured: float, what: str = "measured"
    ) -> None:
        """Print guess, formula and measured value, exact and rounded, and how far off the first two
        were.

        ``what`` is the name of the measured value: ``"predicted"`` if nothing was run.
        """
        measured = _number(measured, self.unit)
        if self.value is not None:
            progress.record_guess(self.id, self.value, measured, unit=self.unit)
        rows = [("guess", self.value)]
        rows += [("formula", _number(formula, self.unit))] if formula is not None else []
        rows += [(what, measured)]
        print(f"{self!r}\n{_table(rows, self.unit)}")
        if self.value is None:
            print("No guess was made. Commit to one first: a wrong guess is one you remember.")

    def commit(self, value: Any) -> str:
        self.value = _number(value, self.unit)
        progress.record_guess(self.id, self.value, unit=self.unit)
        if self.output is not None:
            self.output.update()
        return f"recorded: {show(self.value, self.unit)}; run the next cell"


def show(value: float, unit: str) -> str:
    """ "1.50 GiB = 1,610,612,736 bytes", or the plain number and its unit."""
    human = f"{format_bytes(value)} = " if unit == "bytes" and abs(value) >= 1024 else ""
    return f"{human}{_exact(value)} {unit}".rstrip()


def how_far(guess: float, measured: float) -> str:
    """How far ``guess`` is from ``measured``, in words: "exact", "within 3 %", "2.1 times too
    high".
    """
    if guess == measured:
        return "exact"
    if guess == 0 or measured == 0 or guess * measured < 0:
        return "too high" if guess > measured else "too low"
    side = "too high" if abs(guess) > abs(measured) else "too low"
    ratio = max(guess / measured, measured / guess)
    off = abs(guess - measured) / abs(measured)
    if off < 0.001:
        return "within 0.1 %"
    if off <= 0.1:
        return f"within {math.ceil(round(off * 100, 6))} %"
    if ratio < 2:
        return f"{off:.0%} {side}".replace("%", " %")
    if ratio >= _LONGEST:
        return f"more than {_LONGEST:.0e} times {side}"
    digits = 1 if ratio < 100 else 0
    return f"{ratio:,.{digits}f} times {side}"


def _table(rows: list[tuple[str, float | None]], unit: str) -> str:
    """One aligned line per row; the last is the measured value, which the others are
    compared with.
    """
    measured = rows[-1][1]
    cells = []
    for row, (name, value) in enumerate(rows, 1):
        if value is None:
            cells.append((name, "none", "", ""))
            continue
        human = format_bytes(value) if unit == "bytes" else ""
        # The last row, whatever its name, is not compared with itself.
        far = "" if row == len(rows) else how_far(value, measured)
        cells.append((name, f"{_exact(value)} {unit}", human, far))
    wide = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = (
        f"  {name:<{wide[0]}}  {exact:>{wide[1]}}  {human:>{wide[2]}}  {far}"
        for name, exact, human, far in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _exact(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < _LONGEST else f"{value:,.6g}"


def _number(value: Any, unit: str) -> int | float:
    """``value`` as a number of ``unit``, whole where it can be.

    Raises ``ValueError`` with a sentence.
    """
    if hasattr(value, "item"):
        value = value.item()  # numpy scalars and 0-d tensors
    if unit == "bytes":
        return 0 if _plain_number(value, unit) == 0 else parse_bytes(_worked_out(value))
    number = _plain_number(value, unit)
    if number is None:
        raise ValueError(
            f"cannot read {value!r} as a number: give one such as 42, 0.5, 4*1024 or 600e6 "
            f"(the unit is {unit})"
        )
    return int(number) if number.is_integer() else number


def _plain_number(value: Any, unit: str) -> float | None:
    share = 1.0
    if isinstance(value, str):
        value = value.strip().removesuffix(unit).strip()
        if value.endswith("%") and unit in ("%", "percent", "", "times"):
            value, share = value[:-1], 1.0 if unit in ("%", "percent") else 0.01
    try:
        number = float(_number_of(value)) * share
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and not isinstance(value, bool) else None


def _number_of(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value.replace(",", "").replace("_", ""))
    except ValueError:
        return _calculated(value)


def _worked_out(size: Any) -> Any:
    """``"4 * 1.5 GiB"`` as ``"6.0 GiB"``; anything that is no calculation as it came."""
    match = (
        re.fullmatch(r"(.*[\d)])\s*([a-z]*)\s*", size, re.IGNORECASE)
        if isinstance(size, str)
        else None
    )
    worked_out = _calculated(match[1]) if match else None
    if worked_out is None or not re.search(r"[*×·/+()-]", match[1]):
        return size
    return f"{worked_out:.17g} {match[2]}" if 0 < worked_out < 2**63 else size


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _calculated(text: str) -> int | float | None:
    """The value of a number, or of numbers joined by + - * / ** and brackets; ``None`` for anything
    else.
    """

    def value(node: ast.AST) -> int | float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base, exponent = value(node.left), value(node.right)
            if abs(base) <= 1e6 and abs(exponent) <= 64:
                return base**exponent
        raise ValueError("no calculation")

    text = text.replace(",", "").replace("×", "*").replace("·", "*").strip()
    try:
        return value(ast.parse(text, mode="eval").body) if 0 < len(text) <= 200 else None
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError):
        return None


def _display(asked: Guess) -> None:
    """The input where widgets work, over the same line of text everywhere: that is what a saved
    notebook compares.
    """
    example = "1.5 GiB" if asked.unit == "bytes" else "42"
    line = f'{asked!r}: {asked.question} (commit to a number with .guess("{example}"))'
    if not in_kernel():
        print(line)
        return
    from ...view.live import live

    if live():
        asked.output = _Output(asked, line, example)
    else:
        from IPython.display import display

        display({"text/plain": line}, raw=True)


class _Output:
    """A guess's output: the input while the kernel lives; in the file, the question and what was
    guessed.
    """

    def __init__(self, asked: Guess, line: str, example: str):
        from IPython.display import display

        from ...view.place import place

        self._asked, self._line = asked, line
        self._place = place(_widget(asked, example))
        self._handle = display(self._data(), raw=True, display_id=True)

    def update(self) -> None:
        """Write the guess into the output, so that the saved notebook has it."""
        self._handle.update(self._data(), raw=True)

    def _data(self) -> dict[str, str]:
        asked = self._asked
        still = html.escape(self._line)
        if asked.value is not None:
            question = html.escape(f"{asked!r}: {asked.question}")
            still = f"{question}<br>Your guess: {html.escape(show(asked.value, asked.unit))}"
        return {"text/plain": self._line, "text/html": self._place.html(still)}


def _widget(asked: Guess, example: str):
    import ipywidgets as widgets

    def say(sentence: str) -> None:
        status.value = html.escape(sentence)

    def submit(_=None) -> None:
        try:
            say(asked.commit(field.value))
        except ValueError as error:
            say(str(error))

    question = widgets.HTML(html.escape(f"{asked!r}: {asked.question}"))
    field = widgets.Text(
        placeholder=f"for example {example}",
        description="Your guess",
        continuous_update=False,
        tooltip=asked.question,
    )
    button = widgets.Button(description="Commit", tooltip="Record this guess")
    status = widgets.HTML()
    if asked.value is not None:
        say(
            f"your guess so far: {show(asked.value, asked.unit)}; run the next cell, or guess again"
        )
    field.observe(submit, names="value")  # Enter, or leaving the field
    button.on_click(submit)
    return widgets.VBox([question, widgets.HBox([field, button]), status])
