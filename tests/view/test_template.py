"""Templates: what is filled in stays words, and what is forgotten is an error."""

import jinja2
import pytest

from gradmem_lib.view.template import html_from, text_from


def test_html_is_escaped_and_has_no_line_breaks():
    words = "<b> & 'so' \"on\""
    template = """
    <p>
      {{ words }}{{ mark | safe }}
    </p>
    """
    escaped = "&lt;b&gt; &amp; &#x27;so&#x27; &quot;on&quot;"
    assert html_from(template, words=words, mark="<br>") == f"<p>{escaped}<br></p>"


def test_text_keeps_its_lines_and_its_signs():
    template = "a\n{% for x in xs %}\n  {{ x }}\n{% endfor %}\n"
    assert text_from(template, xs=["<", "'"]) == "a\n  <\n  '\n"


@pytest.mark.parametrize("fill", [html_from, text_from])
def test_a_value_that_was_not_given_is_an_error(fill):
    with pytest.raises(jinja2.UndefinedError, match="words"):
        fill("{{ words }}", word=1)
