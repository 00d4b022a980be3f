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
if __name__ == "__main__":  # in a test, pyproject.toml has these paths
    sys.path[:0] = [str(ROOT / name) for name in ("tools", "teaching", "tests")]

from course.stated.sentences import Source, is_figure, numbers, sources  # noqa: E402

SHORTEST_QUOTE = 12  # letters: fewer could be quoted by chance


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


def _figures(sentence: str) -> list[str]:
    """The numbers of a sentence that can be looked up: others are too short to tell anything."""
    return [number for number in numbers(sentence) if is_figure(number)]


def _rounds_to(printed: str, said: str) -> bool:
    """Whether the printed number is the said one, rounded to its digits."""
    decimals = len(said.partition(".")[2])
    value = float(printed.replace(",", ""))
    return f"{value:.{decimals}f}" == said.replace(",", "")


def is_printed(source: Source, sentence: str) -> bool:
    """Whether each figure of the sentence is one that the lesson's cells printed, rounded."""
    printed = set(re.findall(r"\d[\d,]*(?:\.\d+)?", source.printed))
    said = _figures(sentence)
    for figure in said:
        if not any(_rounds_to(number, figure) for number in printed):
            return False
    return bool(said)


def is_in_code(source: Source, sentence: str) -> bool:
    """Whether each figure of the sentence stands in the lesson's code."""
    written = {found.replace("_", "") for found in re.findall(r"\d[\d_]*(?:\.\d+)?", source.code)}
    said = {figure.replace(",", "") for figure in _figures(sentence)}
    return bool(said) and said <= written


def is_computed(source: Source, sentence: str) -> bool:
    """Whether each number of the sentence is filled in when the claim is shown."""
    said = numbers(sentence)
    typed = source.typed_numbers or set()
    return bool(said) and typed.isdisjoint(said)


@cache
def _quotes(file: str) -> dict[str, list[str]]:
    """What each test of a file quotes: a pattern for each string in it."""
    (path,) = (ROOT / "tests").rglob(file)
    quotes = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            quotes[node.name] = _patterns_of_strings(node)
    return quotes


def _patterns_of_strings(function: ast.FunctionDef) -> list[str]:
    """The strings in a function as patterns, with any text for the values in an f-string."""
    patterns = []
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            patterns.append(re.escape(node.value))
        elif isinstance(node, ast.JoinedStr):
            pattern = ""
            for piece in node.values:
                is_text = isinstance(piece, ast.Constant)
                pattern += re.escape(piece.value) if is_text else ".*?"
            patterns.append(pattern)
    return patterns


def is_quoted_by(test: str, sentence: str) -> bool:
    """Whether a test (``FILE.py::NAME``) exists and quotes enough letters of the sentence."""
    file, _, name = test.partition("::")
    for pattern in _quotes(file).get(name, []):
        letters = pattern.replace(".*?", "").replace("\\", "")  # without what re.escape added
        if len(letters) >= SHORTEST_QUOTE and re.search(pattern, sentence):
            return True
    return False


def problem(source: Source, sentence: str, how: str) -> str:
    """Why the listed way does not show what the sentence says, or an empty text."""
    kind, _, rest = how.partition(" ")
    if how == "printed":
        holds = is_printed(source, sentence)
        fault = "no cell printed these numbers"
    elif how == "code":
        holds = is_in_code(source, sentence)
        fault = "these numbers are not in the code"
    elif how == "computed":
        holds = is_computed(source, sentence)
        fault = "some of these numbers are written down"
    elif kind == "lesson":
        number, _, pattern = rest.partition(": ")
        (lesson,) = sources(number)
        holds = re.search(pattern, lesson.printed, re.MULTILINE)
        fault = f"lesson {number} printed nothing like {pattern!r}"
    elif kind == "printed:":
        holds = re.search(rest, source.printed, re.MULTILINE)
        fault = f"no cell printed {rest!r}"
    elif kind == "test":
        holds = is_quoted_by(rest, sentence)
        fault = f"{rest} does not exist or quote it"
    else:
        # Nothing to compute: a person reads where it comes from, or why nothing is to be shown.
        holds = kind in ("source:", "given:") and len(rest) >= 8
        fault = f"{how!r} is none of the ways: see ways.py"
    return "" if holds else fault


def _proved(source: Source, sentence: str) -> str:
    """The way that already proves the sentence, or a question mark."""
    is_claim = source.typed_numbers is not None
    if is_claim:
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
