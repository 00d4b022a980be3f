"""Shows a claim: one line with the verdict, which unfolds to the sentence, the figures and the
reason.
"""

from __future__ import annotations

import html
import textwrap

from ...display import in_kernel
from .finding import Figure, Finding
from .table import Claim

OPEN = "open"


def value(number: int | float | str) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:.3g}" if isinstance(number, float) else number


def with_claimed(figure: Figure) -> str:
    """A figure beside the claimed one, as text."""
    return f"{figure.what}: {figure.text} (claimed {figure.claimed})"


def heading(claim: Claim, finding: Finding | None) -> str:
    return f"{claim.id} {finding.verdict if finding else OPEN}: {claim.says}"


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
    parts = [heading(claim, finding)]
    if finding is not None:
        parts += [
            finding.sentence,
            *(f"- {with_claimed(figure)}" for figure in finding.shown),
            finding.why,
        ]
    lines = [
        textwrap.fill(part, 100, initial_indent="   " if i else "", subsequent_indent="   ")
        for i, part in enumerate(parts)
        if part
    ]
    rows = finding.figures if finding and figures else {}
    width = max(map(len, rows), default=0)
    return "\n".join(
        [*lines, *(f"   {name:{width}}  {value(number)}" for name, number in rows.items())]
    )


def as_html(claim: Claim, finding: Finding | None, figures: bool = False) -> str:
    """The same, folded behind its heading."""
    if finding is None:
        return f"<p><b>{claim.id} {OPEN}</b>: {html.escape(claim.says)}</p>"
    head = f"<b>{claim.id} {finding.verdict}</b>: {html.escape(claim.says)}"
    shown = "".join(f"<li>{html.escape(with_claimed(figure))}</li>" for figure in finding.shown)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value(number))}</td></tr>"
        for name, number in (finding.figures if figures else {}).items()
    )
    body = f"<p>{html.escape(finding.sentence)}</p><ul>{shown}</ul>"
    body += f"<p>{html.escape(finding.why)}</p>" if finding.why else ""
    body += f"<table>{rows}</table>" if rows else ""
    return f"<details><summary>{head}</summary>{body}</details>"
