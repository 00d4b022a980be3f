"""docs/ledger.md: one table of all claims, then an entry of ten seconds for each, with everything
else folded.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..machine.course_files import IMPORT_ROOT
from .display import value, with_claimed
from .finding import VERDICTS, Finding
from .table import CLAIMS, DOCUMENTS, Claim

LESSONS = IMPORT_ROOT / "solutions"


def shown_in(folder: Path = LESSONS) -> dict[str, list[str]]:
    """For each claim, the numbers of the lessons that show it, found in the calls of
    their cells.
    """
    found: dict[str, list[str]] = {}
    for lesson in sorted(folder.glob("[0-9][0-9]_*.py")):
        text = lesson.read_text(encoding="utf-8")
        calls = re.findall(r"^claims\.show\((.*?)\)", text, re.M | re.S)
        for claim_id in sorted(set(re.findall(r"C\d\d", " ".join(calls)))):
            found.setdefault(claim_id, []).append(lesson.name[:2])
    return found


TOP = """# Claims ledger

Here is what five documents about training memory say ({claims} claims, in our words), and \
what the course finds.
{claims} are answered: {totals}. *Holds* needs no condition; *holds only if* names the
condition. GB is 1,000,000,000 bytes, GiB is 1,073,741,824.
`python -m gradmem_lib.course.ledger --write` writes this page, and a test computes \
every entry again.

| Claim | Claimed | Found | Verdict |
|---|---|---|---|
{rows}

{entries}
## Documents

{documents}
"""


def as_markdown(findings: dict[str, Finding], lesson_of: dict[str, str]) -> str:
    """The page. ``findings``, and the number of the lesson that is about it: by claim, in order."""
    verdicts = [finding.verdict for finding in findings.values()]
    lessons = shown_in()
    rows, entries = [], []
    for claim_id, finding in findings.items():
        rows.append(_row(CLAIMS[claim_id], finding))
        where = f"Shown here alone: lesson {lesson_of[claim_id]} is about it."
        if claim_id in lessons:
            where = f"Shown in lesson {' and '.join(lessons[claim_id])}."
        entries.append(_entry(CLAIMS[claim_id], finding, where))
    return TOP.format(
        claims=len(findings),
        totals=", ".join(f"{verdicts.count(verdict)} *{verdict}*" for verdict in VERDICTS),
        rows="\n".join(rows),
        entries="\n".join(entries),
        documents="\n".join(f"- {key}: {title}" for key, title in DOCUMENTS.items()),
    )


def _row(claim: Claim, finding: Finding) -> str:
    """The claimed and the found number of the deciding figure: the first that disagrees in the
    claim's own setting or, if none does, elsewhere.
    """
    deciding = (*finding.own, *finding.elsewhere)
    figure = next((f for f in deciding if not f.agrees), finding.own[0])
    name = f"[{claim.id}](#{claim.id.lower()})"
    return f"| {name} | {figure.what}: {figure.claimed} | {figure.text} | {finding.verdict} |"


def _entry(claim: Claim, finding: Finding, where: str) -> str:
    """A claim's part of the page. If several figures share a claimed value, the first shows it."""
    verdict = finding.verdict.capitalize()
    lines = [f"### {claim.id}\n\n> {claim.says}\n"]
    lines.append(f"**{verdict}**{finding.sentence.removeprefix(verdict)}\n")
    claimed = ""
    for figure in finding.shown:
        same = figure.claimed == claimed
        lines.append(f"- {figure.what}: {figure.text}" if same else f"- {with_claimed(figure)}")
        claimed = figure.claimed
    lines.append("\n<details><summary>More</summary>\n")
    if why := finding.said("why"):
        lines.append(f"{why}\n")
    if finding.figures:
        lines.append("| Figure | Found |\n|---|---|")
        lines += [f"| {name} | {value(number)} |" for name, number in finding.figures.items()]
        lines.append("")
    if needs := finding.said("needs"):
        lines.append(f"Needs: {needs}.\n")
    lines.append(f"{claim.document}. {where}\n\n</details>\n")
    return "\n".join(lines)
