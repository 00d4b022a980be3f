"""The sentences of the lessons that state a figure, an order or an optimum, and how each is known.

``NN.txt`` lists them for lesson NN, and ``claims.txt`` those of the ledger's verdicts and reasons,
each with the way to know it in the indented line below:

    printed                     each figure is one that a cell of this lesson printed, rounded
    printed: REGEX              the lesson's cells printed this (for an order, or a word like half)
    code                        each figure is a setting in the code of this lesson
    computed                    (claims) each figure is filled in when the claim is shown
    test FILE.py::NAME          that test quotes the sentence, or a part of it, and recomputes it
    source: WHERE               somebody else's figure, which the lesson or the ledger cites
    given: WHY                  nothing to test: an assumption, a definition, arithmetic in sight

``python tests/course/stated/stated.py 03`` (or ``claims``) prints the sentences that the list
lacks, with "printed", "code" or "computed" where that already proves them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "teaching")]

from lesson_facts import Lesson, lessons  # noqa: E402

# Numbers that name something: lessons, exercises and predictions, cards, headings.
NAMES = re.compile(
    r"[Ll]essons? \d\d(?:(?:, | and | to | or )\d\d)*"
    r"|[Ee]xercises? \d+\.\d+(?:(?:, | and | to | or )\d+\.\d+)*"
    r"|RTX \d+|\b\d{1,2}\.[a-z]\b|§ ?\d+|[Ss]ections? \d+|`[^`]*`|\[[^\]]*\]\([^)]*\)"
)
YEAR = re.compile(r"(?:19|20)\d\d")
NUMBER = re.compile(r"(?<![\w.\-])\d[\d,]*(?:\.\d+)?(?![\w\-])")
# A small whole number counts something in sight ("4 micro-batches"); with a unit it is a figure.
UNIT = re.compile(
    r"\d[ -]?(?:%|×|times|bytes?|bits?|[KMGT]i?B|kB|ms|µs|s|seconds?|minutes?|hours?|FLOP|TFLOP)"
    r"(?![\w])"
)
ORDER = re.compile(
    r"\b(twice|half|thirds?|quarters?|(?:fif|six|seven|eigh|ten|sixteen|twentie)ths?"
    r"|most|least|largest|smallest|highest"
    r"|lowest|fastest|slowest|cheapest|faster|slower|cheaper|best|worst|double[sd]?|halve[sd]?"
    r"|nearest|(?:more|less|fewer|larger|smaller|higher|lower|longer|shorter) than"
    r"|(?:two|three|four|five|six|seven|eight|ten|sixteen) (?:bytes|copies|times|tensors|bits))\b",
    re.IGNORECASE,
)
# Neither "et al." nor a colon in code ends a sentence.
SENTENCE_END = re.compile(r"`[^`]*`|(?<=[.!?:])(?<!al\.)[*_\"”)]*\s+(?=[A-Z*\"“(`\d√])")


def numbers(text: str) -> list[str]:
    """The numbers that a text states, without those that are only names."""
    return [found.rstrip(",") for found in NUMBER.findall(NAMES.sub(" ", text))]


def is_figure(number: str) -> bool:
    """Whether a number is one that would be measured or derived: three digits, or a fraction."""
    is_long = len(number.replace(",", "")) >= 3 and not YEAR.fullmatch(number)
    return "." in number or is_long


def states(sentence: str) -> bool:
    """Whether the sentence states a figure, an order or an optimum."""
    bare = NAMES.sub(" ", sentence)
    if re.match(r"●|Hint \d|\*\d+ minutes", sentence):
        return False  # the line below an exercise's title, and the titles of hints
    return (
        any(is_figure(number) for number in numbers(sentence))
        or UNIT.search(bare) is not None
        or ORDER.search(bare) is not None
    )


def _blocks(markdown: str) -> Iterator[str]:
    """Paragraphs, items of lists and rows of tables, without headings, code and rules."""
    markdown = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    markdown = re.sub(r"<[^>]+>", " ", markdown)
    for paragraph in re.split(r"\n\s*\n", markdown):
        for block in re.split(r"\n(?=\s*(?:[-*] |\||\d+\. ))", paragraph):
            block = " ".join(block.split())
            is_rule = re.fullmatch(r"[|\-: ]*", block)
            if not block.startswith("#") and not is_rule:
                yield block


def _sentences(block: str) -> Iterator[str]:
    start = 0
    for end in SENTENCE_END.finditer(block):
        if not end[0].startswith("`"):
            yield block[start : end.start()]
            start = end.end()
    yield block[start:]


def stated(lesson: Lesson | Entry) -> list[str]:
    """The lesson's sentences with a figure, an order or an optimum, in order."""
    found = []
    for cell in lesson.cells:
        if cell.cell_type != "markdown":
            continue
        for block in _blocks(cell.source):
            for sentence in _sentences(block):
                if states(sentence):
                    found.append(sentence)
    return list(dict.fromkeys(found))


class Entry:
    """A claim of the ledger's page: its verdict and reason as a cell of text, and the figures below
    as what was printed.
    """

    def __init__(self, page: str):
        self.id, _, verdict, shown, _, reason, *_ = page.split("\n\n")
        if reason.startswith("| "):
            reason = ""  # the claim has none, and its table comes next
        self.cells = [SimpleNamespace(cell_type="markdown", source=f"{verdict}\n\n{reason}")]
        rows = "\n".join(line for line in page.splitlines() if line.startswith("| "))
        self.printed = re.sub(r" \(claimed .*?\)", "", shown) + "\n" + rows
        self.typed = _typed_in_answers(self.id)


def _typed_in_answers(claim_id: str) -> set[str]:
    """The numbers that stand in a text of the file that answers a claim. All others in the claim's
    sentences are filled in when they are shown.
    """
    (source,) = (
        path.read_text(encoding="utf-8")
        for path in (ROOT / "gradmem_lib" / "course" / "lessons").glob("lesson_*/claims*.py")
        if f'@answers("{claim_id}")' in path.read_text(encoding="utf-8")
    )
    texts = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {number for text in texts for number in numbers(text)}


def entries() -> list[Entry]:
    """The claims of the ledger's page, which a test holds to what the answers compute."""
    page = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    _, *pages = re.split(r"^### (?=C\d\d$)", page, flags=re.MULTILINE)
    return [Entry(page) for page in pages]


def sources(name: str) -> list[Lesson | Entry]:
    """What has the sentences of the list ``name``: a lesson, or all claims."""
    if name == "claims":
        return entries()
    return [lesson for lesson in lessons() if lesson.number == name]


def listed(name: str) -> dict[str, str]:
    """What ``NN.txt`` says: how each sentence is known."""
    path = HERE / f"{name}.txt"
    known = {}
    sentence = None
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


def is_printed(lesson: Lesson, sentence: str) -> bool:
    """Whether each number of the sentence is one that the lesson's cells printed."""
    printed = set(re.findall(r"\d[\d,]*(?:\.\d+)?", lesson.printed))
    said = [number for number in numbers(sentence) if is_figure(number)]
    return bool(said) and all(
        any(_rounds_to(number, wanted) for number in printed) for wanted in said
    )


def is_in_code(lesson: Lesson, sentence: str) -> bool:
    """Whether each number of the sentence stands in the lesson's code."""
    code = "\n".join(cell.source for cell in lesson.cells if cell.cell_type == "code")
    written = {found.replace("_", "") for found in re.findall(r"\d[\d_]*(?:\.\d+)?", code)}
    said = [number for number in numbers(sentence) if is_figure(number)]
    return bool(said) and all(wanted.replace(",", "") in written for wanted in said)


def is_computed(entry: Entry, sentence: str) -> bool:
    """Whether each number of the sentence is filled in when the claim is shown."""
    said = numbers(sentence)
    return bool(said) and not entry.typed.intersection(said)


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


def problem(lesson: Lesson | Entry, sentence: str, how: str) -> str:
    """Why the listed way does not show what the sentence says, or an empty text."""
    kind, _, rest = how.partition(" ")
    if how == "printed":
        return "" if is_printed(lesson, sentence) else "no cell printed these numbers"
    if how == "code":
        return "" if is_in_code(lesson, sentence) else "these numbers are not in the code"
    if how == "computed":
        return "" if is_computed(lesson, sentence) else "some of these numbers are written down"
    if kind == "printed:":
        found = re.search(rest, lesson.printed, re.MULTILINE)
        return "" if found else f"no cell printed {rest!r}"
    if kind == "test":
        return "" if is_quoted_by(rest, sentence) else f"{rest} does not exist or quote it"
    if kind in ("source:", "given:") and len(rest) >= 8:
        return ""
    return f"{how!r} is none of the ways: see stated.py"


def main() -> None:
    name = sys.argv[1]
    known = listed(name)
    for source in sources(name):
        for sentence in stated(source):
            if sentence not in known:
                print(f"{sentence}\n    {_proved(source, sentence)}")


def _proved(source: Lesson | Entry, sentence: str) -> str:
    """The way that already proves the sentence, or a question mark."""
    if isinstance(source, Entry):
        return "computed" if is_computed(source, sentence) else "?"
    if is_printed(source, sentence):
        return "printed"
    return "code" if is_in_code(source, sentence) else "?"


if __name__ == "__main__":
    main()
