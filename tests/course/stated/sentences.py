"""Finds the sentences that state a figure, an order or an optimum: in the lessons, in the teacher's
notes and in the ledger; and all that stands on the sheets for the wall.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from build_notebooks import FIGURE, read_source
from lesson_facts import Lesson, lessons
from sheet_facts import sheet

ROOT = Path(__file__).resolve().parents[3]

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
    r"|(?:two|three|four|five|six|seven|eight|ten|sixteen|thirty|fifty|hundred)"
    r" (?:bytes|copies|times|tensors|bits))\b",
    re.IGNORECASE,
)
# Neither "et al." nor a colon in code ends a sentence: a span of code is found first, as a whole,
# and ``_sentences`` passes over it.
SENTENCE_END = re.compile(r"`[^`]*`|(?<=[.!?:])(?<!al\.)[*_\"”)]*\s+(?=[A-Z*\"“(`\d√])")


def numbers(text: str) -> list[str]:
    """The numbers that a text states, without those that are only names."""
    return [found.rstrip(",") for found in NUMBER.findall(NAMES.sub(" ", text))]


def is_figure(number: str) -> bool:
    """Whether a number is one that would be measured or derived: three digits, or a fraction."""
    is_fraction = "." in number
    has_three_digits = len(number.replace(",", "")) >= 3
    is_year = YEAR.fullmatch(number) is not None
    return is_fraction or (has_three_digits and not is_year)


def states(sentence: str) -> bool:
    """Whether the sentence states a figure, an order or an optimum."""
    if re.match(r"●|Hint \d|\*\d+ minutes", sentence):
        return False  # the line below an exercise's title, and the titles of hints
    if any(is_figure(number) for number in numbers(sentence)):
        return True
    bare = NAMES.sub(" ", sentence)
    return UNIT.search(bare) is not None or ORDER.search(bare) is not None


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
    """The sentences of a block, in order."""
    start = 0
    for end in SENTENCE_END.finditer(block):
        if not end[0].startswith("`"):
            yield block[start : end.start()]
            start = end.end()
    yield block[start:]


@dataclass
class Source:
    """What has sentences: a lesson, a page, or a claim of the ledger.

    ``sentences``: those that state something. ``printed``: what a lesson's cells printed, or the
    figures that a claim shows. ``code``: the lesson's code. ``typed_numbers``: of a claim, the
    numbers that somebody typed into the texts of the file that answers it. All others in its
    sentences are filled in when the claim is shown. ``None``: this is no claim.
    """

    sentences: list[str]
    printed: str = ""
    code: str = ""
    typed_numbers: set[str] | None = None


def stated_in(texts: Iterable[str]) -> list[str]:
    """The sentences of texts in markdown that state something, in order, each once."""
    found = []
    for markdown in texts:
        for block in _blocks(markdown):
            found += [sentence for sentence in _sentences(block) if states(sentence)]
    return list(dict.fromkeys(found))  # without repetitions


def sources(name: str) -> list[Source]:
    """What has the sentences of the list ``name``."""
    if name == "teaching":
        return [_notes()]
    if name == "sheets":
        return [_sheets()]
    if name == "claims":
        return claims()
    return [_source(lesson) for lesson in lessons() if lesson.number == name]


COMPUTED = "⁂"  # stands where the builder fills in a figure, or computes whether it holds


def _source(lesson: Lesson) -> Source:
    """A lesson as its author writes it. What is computed when it is built need not be known."""
    texts: dict[str, list[str]] = {"markdown": [], "code": []}
    for cell in read_source(lesson.source).cells:
        text = FIGURE.sub(COMPUTED, cell.source)
        text = re.sub(
            r"([.:!?][*_]*)\s*<!-- holds: .+? -->", rf"{COMPUTED}\1", text, flags=re.DOTALL
        )
        texts[cell.cell_type].append(text)
    sentences = []
    for sentence in stated_in(texts["markdown"]):
        if COMPUTED not in sentence or any(map(is_figure, numbers(sentence))):
            sentences.append(sentence)
    return Source(sentences, lesson.printed, "\n".join(texts["code"]))


def _notes() -> Source:
    """The teacher's notes. Each row of a run sheet becomes a paragraph, where other code would be
    left out.
    """
    notes = (ROOT / "teaching" / "notes.md").read_text(encoding="utf-8")
    run_sheet = re.compile(r"```run \d+\n(.*?)```", re.DOTALL)
    notes = run_sheet.sub(lambda found: found[1].replace("\n", "\n\n"), notes)
    return Source(stated_in([notes]))


def _sheets() -> Source:
    """All captions, numbers and rules of the sheets for the wall."""
    found = []
    for lesson in lessons():
        facts = sheet(lesson)
        numbered = [f"{value} {words}" for value, words in facts.numbers]
        for text in (facts.caption, *numbered, facts.rule):
            found.append(f"{lesson.number}: {text}")
    return Source(found)


def claims() -> list[Source]:
    """The claims of the ledger's page, which a test holds to what the answers compute: the
    sentences of verdict and reason.
    """
    page = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    # What stands above the first claim is left out.
    _, *entries = re.split(r"^### (?=C\d\d$)", page, flags=re.MULTILINE)
    return [_claim(entry) for entry in entries]


def _claim(entry: str) -> Source:
    """A claim of the page: its paragraphs stand in this order, and more may follow."""
    claim_id, _, verdict, shown, _, reason, *_ = entry.split("\n\n")
    if reason.startswith("| "):
        reason = ""  # the claim has none, and its table comes next
    rows = "\n".join(line for line in entry.splitlines() if line.startswith("| "))
    # What was claimed proves nothing: only what was found counts as printed.
    found = re.sub(r" \(claimed .*?\)", "", shown)
    printed = f"{found}\n{rows}"
    typed_numbers = _numbers_typed_in(_file_that_answers(claim_id))
    return Source(stated_in([verdict, reason]), printed, typed_numbers=typed_numbers)


def _file_that_answers(claim_id: str) -> Path:
    """The only file that has the answer to a claim."""
    found = []
    for path in (ROOT / "gradmem_lib" / "course" / "lessons").glob("lesson_*/claims*.py"):
        if f'@answers("{claim_id}")' in path.read_text(encoding="utf-8"):
            found.append(path)
    (path,) = found
    return path


# Their second argument is what a source claims.
COMPARE = ("about", "between", "at_least")


def _numbers_typed_in(path: Path) -> set[str]:
    """The numbers in the texts of a Python file, the constant parts of f-strings included, but not
    in what a source claims.
    """
    typed, claimed = set[str](), set[ast.expr]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in COMPARE:
            claimed.add(node.args[1])  # a call comes before its arguments
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in claimed:
            typed.update(numbers(node.value))
    return typed
