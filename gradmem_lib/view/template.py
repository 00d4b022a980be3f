"""Pages from templates of jinja2: a template says in one place what a page looks like."""

from __future__ import annotations

import html
from functools import cache
from typing import Any


@cache
def _template(text: str, **settings: Any):
    import jinja2  # here, since only those who draw need it

    # a name that no value was given for is an error, not an empty place
    return jinja2.Environment(undefined=jinja2.StrictUndefined, **settings).from_string(text)


def html_from(template: str, **values: Any) -> str:
    """HTML or SVG. What is filled in is escaped, unless it is marked as ``safe``.

    Line breaks and indents are dropped without a space: a sentence stays on one line of the
    template, or its first line ends with ``{{ " " }}``.
    """
    joined = "".join(map(str.strip, template.splitlines()))
    return _template(joined, autoescape=True, finalize=_escaped).render(values)


def _escaped(value: Any) -> Any:
    """As ``html.escape`` does: jinja2 itself would write other signs for quotes."""
    from markupsafe import Markup

    if hasattr(value, "__html__"):
        return value
    return Markup(html.escape(str(value)))


def text_from(template: str, **values: Any) -> str:
    """Lines of text or of code. Those with nothing but ``{% ... %}`` are left out."""
    settings = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return _template(template, **settings).render(values)
