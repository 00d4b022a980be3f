"""Sphinx's settings for the course's site."""

import sys
import tomllib
from pathlib import Path

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parent.parent
# The docstrings are the imported library's: its packages are those of .venv, behind the ones of
# this environment.
sys.path.insert(0, str(ROOT))
sys.path += map(str, (ROOT / ".venv").glob("[Ll]ib/**/site-packages"))

project, author, copyright = "gradmem", "The gradmem authors", "The gradmem authors, Apache-2.0"
described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
version = release = described["version"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
nb_execution_mode = "off"
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath", "tasklist"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]
add_module_names = False
autodoc_member_order = "bysource"
# A name for a type, such as tuple[int, ...], says that it comes from builtins, which has no page.
viewcode_follow_imported_members = False
autodoc_typehints = "none"
napoleon_use_ivar = True
html_theme = "sphinx_book_theme"
html_title = "gradmem"
html_math_renderer = "mathml"
html_static_path = [str(ROOT / "build/site/static")]
html_extra_path = [str(ROOT / "build/site/extra")]
html_css_files = ["site.css"]
html_js_files = ["copy.js", "cards.js"]
templates_path = ["templates"]
html_copy_source = html_show_sourcelink = False
# Once pyproject.toml names where issues are kept, the footer's link leads there.
html_context = {"default_mode": "auto", "issues": described.get("urls", {}).get("Issues", "")}
html_theme_options = {
    "use_download_button": False,
    "navbar_persistent": [],
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "footer_content_items": ["report.html", "author.html", "copyright.html"],
    "show_toc_level": 2,
}


def _inline(self, node) -> None:
    self.body.append(convert(node.astext()))
    raise_skip()


def _block(self, node) -> None:
    self.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise_skip()


def raise_skip() -> None:
    from docutils.nodes import SkipNode

    raise SkipNode


def setup(app) -> None:
    """Formulas become MathML, which browsers draw by themselves."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
