"""Shows a claim: one line with the verdict, which unfolds to the sentence, the figures and the
reason.
"""

from __future__ import annotations

import textwrap

from ...display import in_kernel
from ...view.template import html_from
from .finding import Figure, Finding, in_unit
from .table import Claim

INDENT = "   "  # of what stands below a heading


def value(number: int | float | str) -> str:
    if isinstance(number, bool):
        return in_unit(number, "yes")
    if isinstance(number, str):
        return number
    return in_unit(number, "")


def with_claimed(figure: Figure) -> str:
    """A figure beside the claimed one, as text."""
    return f"{figure.what}: {figure.text} (claimed {figure.claimed})"


def draw(found: list[tuple[Claim, Finding]]) -> None:
    """Draw the claims in a notebook, print them elsewhere.

    The plain text of a notebook is the headings alone.
    """
    if not in_kernel():
        print("\n\n".join(as_text(claim, finding) for claim, finding in found))
        return
    from IPython.display import display

    plain = "\n".join(f"{claim.id} {finding.verdict}: {claim.says}" for claim, finding in found)
    folded = "".join(as_html(claim, finding) for claim, finding in found)
    display({"text/plain": plain, "text/html": folded}, raw=True)


def as_text(claim: Claim, finding: Finding) -> str:
    """Heading, sentence, figures and reason in lines of at most 100 characters."""
    heading = f"{claim.id} {finding.verdict}: {claim.says}"
    lines = [textwrap.fill(heading, 100, subsequent_indent=INDENT)]
    figures = [f"- {with_claimed(figure)}" for figure in finding.shown]
    for part in (finding.sentence, *figures, finding.said("why")):
        if part:  # not every finding has a reason
            lines.append(textwrap.fill(part, 100, initial_indent=INDENT, subsequent_indent=INDENT))
    return "\n".join(lines)


CLAIM = """
<details>
  <summary><b>{{ claim.id }} {{ finding.verdict }}</b>: {{ claim.says }}</summary>
  <p>{{ finding.sentence }}</p>
  <ul>{% for figure in finding.shown %}<li>{{ with_claimed(figure) }}</li>{% endfor %}</ul>
  {% if finding.said("why") %}<p>{{ finding.said("why") }}</p>{% endif %}
</details>
"""


def as_html(claim: Claim, finding: Finding) -> str:
    """The same, folded behind its heading."""
    return html_from(CLAIM, claim=claim, finding=finding, with_claimed=with_claimed)
