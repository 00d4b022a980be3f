"""How each sentence that states a figure, an order or an optimum is known.

``NN.txt`` lists those of lesson NN, ``teaching.txt`` those of teaching/notes.md, ``claims.txt``
those of the ledger's verdicts and reasons, and ``sheets.txt`` all that stands on the sheets for the
wall. The way to know each is in the indented line below it:

    printed                     each figure is one that a cell of this lesson printed, rounded
    printed: REGEX              the lesson's cells printed this (for an order, or a word like half)
    lesson NN: REGEX            lesson NN's cells printed this
    code                        each figure is a setting in the code of this lesson
    computed                    (claims) each figure is filled in when the claim is shown
    test FILE.py::NAME          that test quotes the sentence, or a part of it, and recomputes it
    source: WHERE               somebody else's figure, which the lesson or the ledger cites
    given: WHY                  nothing to test: an assumption, a definition, arithmetic in sight

``python tests/course/stated/ways.py 03`` (or ``sheets``) prints the sentences that its list lacks,
with "printed", "code" or "computed" where that already proves them.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("tools", "teaching", "tests")]

from course.stated.sentences import Source, is_figure, numbers, sources  # noqa: E402


def listed(name: str) -> dict[str, str]:
    """What ``NAME.txt`` says: how each sentence is known."""
    path = HERE / f"{name}.txt"
    known: dict[str, str] = {}
    sentence = ""
    if not path.exists():
        return known
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            known[sentence] = line.strip()
        elif line:
            sentence = line
            known[sentence] = ""
    return known


def _rounds_to(printed: str, said: str) -> bool:
    """Whether the printed number is the said one, rounded to its digits."""
    decimals = len(said.partition(".")[2])
    value = float(printed.replace(",", ""))
    return f"{value:.{decimals}f}" == said.replace(",", "")


def is_printed(source: Source, sentence: str) -> bool:
    """Whether each number of the sentence is one that the lesson's cells printed."""
    printed = set(re.findall(r"\d[\d,]*(?:\.\d+)?", source.printed))
    said = [number for number in numbers(sentence) if is_figure(number)]
    return bool(said) and all(
        any(_rounds_to(number, wanted) for number in printed) for wanted in said
    )


def is_in_code(source: Source, sentence: str) -> bool:
    """Whether each number of the sentence stands in the lesson's code."""
    written = {found.replace("_", "") for found in re.findall(r"\d[\d_]*(?:\.\d+)?", source.code)}
    said = [number for number in numbers(sentence) if is_figure(number)]
    return bool(said) and all(wanted.replace(",", "") in written for wanted in said)


def is_computed(source: Source, sentence: str) -> bool:
    """Whether each number of the sentence is filled in when the claim is shown."""
    said = numbers(sentence)
    return bool(said) and not (source.typed or set()).intersection(said)


@cache
def _test_functions(file: str) -> dict[str, list[str]]:
    """The patterns that each test of a file quotes: its strings, with any text in the holes of
    f-strings.
    """
    (path,) = (ROOT / "tests").rglob(file)
    quoted = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        patterns = []
        for part in ast.walk(node):
            if isinstance(part, ast.JoinedStr):
                holes = [
                    re.escape(piece.value) if isinstance(piece, ast.Constant) else ".*?"
                    for piece in part.values
                ]
                patterns.append("".join(holes))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                patterns.append(re.escape(part.value))
        quoted[node.name] = patterns
    return quoted


def is_quoted_by(test: str, sentence: str) -> bool:
    """Whether a test (``FILE.py::NAME``) exists and quotes at least a dozen letters of the
    sentence.
    """
    file, _, name = test.partition("::")
    patterns = _test_functions(file).get(name, [])
    return any(
        len(pattern.replace(".*?", "").replace("\\", "")) >= 12 and re.search(pattern, sentence)
        for pattern in patterns
    )


def problem(source: Source, sentence: str, how: str) -> str:
    """Why the listed way does not show what the sentence says, or an empty text."""
    kind, _, rest = how.partition(" ")
    if how == "printed":
        return "" if is_printed(source, sentence) else "no cell printed these numbers"
    if how == "code":
        return "" if is_in_code(source, sentence) else "these numbers are not in the code"
    if how == "computed":
        return "" if is_computed(source, sentence) else "some of these numbers are written down"
    if kind == "lesson":
        number, _, pattern = rest.partition(": ")
        (lesson,) = sources(number)
        found = re.search(pattern, lesson.printed, re.MULTILINE)
        return "" if found else f"lesson {number} printed nothing like {pattern!r}"
    if kind == "printed:":
        found = re.search(rest, source.printed, re.MULTILINE)
        return "" if found else f"no cell printed {rest!r}"
    if kind == "test":
        return "" if is_quoted_by(rest, sentence) else f"{rest} does not exist or quote it"
    if kind in ("source:", "given:") and len(rest) >= 8:
        return ""
    return f"{how!r} is none of the ways: see ways.py"


def _proved(source: Source, sentence: str) -> str:
    """The way that already proves the sentence, or a question mark."""
    if source.typed is not None:
        return "computed" if is_computed(source, sentence) else "?"
    if is_printed(source, sentence):
        return "printed"
    return "code" if is_in_code(source, sentence) else "?"


def main() -> None:
    name = sys.argv[1]
    known = listed(name)
    for source in sources(name):
        for sentence in source.sentences:
            if sentence not in known:
                print(f"{sentence}\n    {_proved(source, sentence)}")


if __name__ == "__main__":
    main()
