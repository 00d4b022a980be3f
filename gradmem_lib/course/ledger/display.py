"""Shows a claim: one line with the verdict, which unfolds to the sentence, the figures and the
reason.
"""

from __future__ import annotations

import html
import textwrap

from ...display import in_kernel
from .finding import Figure, Finding
from .table import Claim

OPEN = "open"  # the verdict of a claim without a finding
INDENT = "   "  # of what stands below a heading


def value(number: int | float | str) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    if isinstance(number, float):
        return f"{number:.3g}"
    return number


def with_claimed(figure: Figure) -> str:
    """A figure beside the claimed one, as text."""
    return f"{figure.what}: {figure.text} (claimed {figure.claimed})"


def heading(claim: Claim, finding: Finding | None) -> str:
    verdict = finding.verdict if finding else OPEN
    return f"{claim.id} {verdict}: {claim.says}"


def display(found: list[tuple[Claim, Finding | None]], figures: bool) -> None:
    """Draw the claims in a notebook, print them elsewhere.

    The plain text of a notebook is the headings alone.
    """
    if not in_kernel():
        print("\n\n".join(as_text(claim, finding, figures) for claim, finding in found))
        return
    from IPython.display import display as draw

    plain = "\n".join(heading(claim, finding) for claim, finding in found)
    folded = "".join(as_html(claim, finding, figures) for claim, finding in found)
    draw({"text/plain": plain, "text/html": folded}, raw=True)


def as_text(claim: Claim, finding: Finding | None, figures: bool = False) -> str:
    """Heading, sentence, figures and reason in lines of at most 100 characters."""
    lines = [textwrap.fill(heading(claim, finding), 100, subsequent_indent=INDENT)]
    if finding is None:
        return lines[0]
    parts = [finding.sentence]
    for figure in finding.shown:
        parts.append(f"- {with_claimed(figure)}")
    parts.append(finding.why)
    for part in parts:
        if part:  # not every finding has a reason
            lines.append(textwrap.fill(part, 100, initial_indent=INDENT, subsequent_indent=INDENT))
    if figures:
        width = max(map(len, finding.figures), default=0)
        for name, number in finding.figures.items():
            lines.append(f"{INDENT}{name:{width}}  {value(number)}")
    return "\n".join(lines)


def as_html(claim: Claim, finding: Finding | None, figures: bool = False) -> str:
    """The same, folded behind its heading."""
    says = html.escape(claim.says)
    if finding is None:
        return f"<p><b>{claim.id} {OPEN}</b>: {says}</p>"
    head = f"<b>{claim.id} {finding.verdict}</b>: {says}"
    shown = ""
    for figure in finding.shown:
        shown += f"<li>{html.escape(with_claimed(figure))}</li>"
    body = f"<p>{html.escape(finding.sentence)}</p><ul>{shown}</ul>"
    if finding.why:
        body += f"<p>{html.escape(finding.why)}</p>"
    if figures and finding.figures:
        body += f"<table>{_table_rows(finding)}</table>"
    return f"<details><summary>{head}</summary>{body}</details>"


def _table_rows(finding: Finding) -> str:
    rows = ""
    for name, number in finding.figures.items():
        rows += f"<tr><td>{html.escape(name)}</td><td>{html.escape(value(number))}</td></tr>"
    return rows
