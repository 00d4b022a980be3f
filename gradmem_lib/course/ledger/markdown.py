"""docs/ledger.md: one table of all claims, then an entry of ten seconds for each, with everything
else folded.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..machine.course_files import IMPORT_ROOT
from .display import OPEN, value, with_claimed
from .finding import VERDICTS, Finding
from .table import CLAIMS, DOCUMENTS, Claim

LESSONS = IMPORT_ROOT / "solutions"


def shown_in(folder: Path = LESSONS) -> dict[str, list[str]]:
    """For each claim, the numbers of the lessons that show it, found in the calls of
    their cells.
    """
    found: dict[str, list[str]] = {}
    for lesson in sorted(folder.glob("[0-9][0-9]_*.py")):
        calls = re.findall(
            r"^claims\.show\((.*?)\)", lesson.read_text(encoding="utf-8"), re.M | re.S
        )
        for claim_id in re.findall(r"C\d\d", " ".join(calls)):
            numbers = found.setdefault(claim_id, [])
            numbers += [lesson.name[:2]] if lesson.name[:2] not in numbers else []
    return found


def markdown(findings: dict[str, Finding | None]) -> str:
    """The page. ``findings``: by claim, in order, None where a claim is open."""
    done = {claim_id: finding for claim_id, finding in findings.items() if finding is not None}
    count = {verdict: sum(f.verdict == verdict for f in done.values()) for verdict in VERDICTS}
    totals = ", ".join(f"{n} *{verdict}*" for verdict, n in count.items())
    lessons = shown_in()
    lines = [
        "# Claims ledger",
        "",
        (
            f"Here is what five documents about training memory say ({len(findings)} claims, in "
            "our words), and what the course finds."
        ),
        (
            f"{len(done)} are answered: {totals}. *Holds* needs no condition; *holds only if* "
            "names the"
        ),
        "condition. GB is 1,000,000,000 bytes, GiB is 1,073,741,824.",
        (
            "`python -m gradmem_lib.course.ledger --write` writes this page, and a test computes "
            "every entry again."
        ),
        "",
        "| Claim | Claimed | Found | Verdict |",
        "|---|---|---|---|",
        *(_row(CLAIMS[claim_id], finding) for claim_id, finding in findings.items()),
        "",
        *(
            line
            for claim_id, finding in done.items()
            for line in _entry(CLAIMS[claim_id], finding, lessons.get(claim_id, []))
        ),
        "## Documents",
        "",
        *(f"- {key}: {title}" for key, title in DOCUMENTS.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(claim: Claim, finding: Finding | None) -> str:
    """The claimed and the found number of the deciding figure: the first that disagrees in the
    claim's own setting or, if none does, elsewhere.
    """
    if finding is None:
        return f"| {claim.id} | {claim.says} | | {OPEN} |"
    deciding = (*finding.own, *finding.elsewhere)
    figure = next((f for f in deciding if not f.agrees), finding.own[0])
    name = f"[{claim.id}](#{claim.id.lower()})"
    return f"| {name} | {figure.what}: {figure.claimed} | {figure.text} | {finding.verdict} |"


def _figures(finding: Finding) -> list[str]:
    """The visible figures. If several share a claimed value, the first of them shows it."""
    claimed = ""
    lines = []
    for figure in finding.shown:
        lines.append(
            f"- {figure.what}: {figure.text}"
            if figure.claimed == claimed
            else f"- {with_claimed(figure)}"
        )
        claimed = figure.claimed
    return lines


def _entry(claim: Claim, finding: Finding, lessons: list[str]) -> list[str]:
    where = f"Shown in lesson {' and '.join(lessons)}." if lessons else "No lesson shows it."
    rows = [f"| {name} | {value(number)} |" for name, number in finding.figures.items()]
    verdict, summary = (
        finding.verdict.capitalize(),
        finding.sentence.removeprefix(finding.verdict.capitalize()),
    )
    return [
        f"### {claim.id}",
        "",
        f"> {claim.says}",
        "",
        f"**{verdict}**{summary}",
        "",
        *_figures(finding),
        "",
        "<details><summary>More</summary>",
        "",
        *([finding.why, ""] if finding.why else []),
        *(["| Figure | Found |", "|---|---|", *rows, ""] if rows else []),
        *([f"Needs: {finding.needs}.", ""] if finding.needs else []),
        f"{claim.document}. {where}",
        "",
        "</details>",
        "",
    ]
