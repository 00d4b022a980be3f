"""docs/ledger.md: one table of all claims, then an entry of ten seconds for each, with everything
else folded.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...view.template import text_from
from ..machine.course_files import IMPORT_ROOT
from .display import value
from .finding import VERDICTS, Figure, Finding
from .table import CLAIMS, DOCUMENTS

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


# If several figures share a claimed value, the first shows it.
PAGE = """\
# Claims ledger

Here is what five documents about training memory say ({{ findings | length }} claims, in our \
words), and what the course finds: {{ totals | join(", ") }}.
GB is 1,000,000,000 bytes, GiB is 1,073,741,824.
`python -m gradmem_lib.course.ledger --write` writes this page; a test computes it again.

| Claim | Claimed | Found | Verdict |
|---|---|---|---|
{% for id, finding in findings.items() %}
{% set figure = deciding(finding) %}
| [{{ id }}](#{{ id | lower }}) | {{ figure.what }}: {{ figure.claimed }} | {{ figure.text }} \
| {{ finding.verdict }} |
{% endfor %}

{% for id, finding in findings.items() %}
### {{ id }}

> {{ claims[id].says }}

**{{ finding.opening }}**{{ finding.sentence.removeprefix(finding.opening) }}

{% for figure in finding.shown %}
- {{ figure.what }}: {{ figure.text }}\
{{ " (claimed %s)" % figure.claimed if loop.changed(figure.claimed) }}
{% endfor %}

<details><summary>More</summary>

{% if finding.said("why") %}
{{ finding.said("why") }}

{% endif %}
{% if finding.figures %}
| Figure | Found |
|---|---|
{% for name, number in finding.figures.items() %}
| {{ name }} | {{ value(number) }} |
{% endfor %}

{% endif %}
{% if finding.said("needs") %}
Needs: {{ finding.said("needs") }}.

{% endif %}
{{ claims[id].document }}. \
{% if id in shown_in %}
Shown in lesson {{ shown_in[id] | join(" and ") }}.
{% else %}
Shown here alone: lesson {{ lesson_of[id] }} is about it.
{% endif %}

</details>

{% endfor %}
## Documents

{% for title in documents.values() %}
- {{ title }}
{% endfor %}
"""


def as_markdown(findings: dict[str, Finding], lesson_of: dict[str, str]) -> str:
    """The page. ``findings``, and the number of the lesson that is about it: by claim, in order."""
    verdicts = [finding.verdict for finding in findings.values()]
    return text_from(
        PAGE,
        findings=findings,
        lesson_of=lesson_of,
        totals=[f"{verdicts.count(verdict)} *{verdict}*" for verdict in VERDICTS],
        claims=CLAIMS,
        documents=DOCUMENTS,
        shown_in=shown_in(),
        value=value,
        deciding=_deciding,
    )


def _deciding(finding: Finding) -> Figure:
    """The first figure that disagrees in the claim's own setting or, if none does, elsewhere."""
    for figure in (*finding.own, *finding.elsewhere):
        if not figure.agrees:
            return figure
    return finding.own[0]
