"""Builds the course's site from what is stored: nothing is executed, and nothing is loaded from a
network.

    make site                            build it into build/site/html, check it, and look at it in
    a browser python site/build.py                 the first two, with the Python of
    requirements-site.txt

The pages' sources are gathered in build/site/source: those of site/pages, and what has its home
elsewhere: the README, the solutions' notebooks with their stored outputs, docs/ledger.md, and the
library's docstrings, which Sphinx reads by itself.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "site"
FITS = ROOT / "benchmarks" / "results" / "fits.json"
FLOORS = (
    "model",
    "measure",
    "techniques",
    "training",
    "prediction",
    "planning",
    "view",
    "run",
    "course",
    "commands",
)
MARK = re.compile(r"^ *### (BEGIN|END) SOLUTION *\n?| *# SOLUTION *$", re.MULTILINE)
# The pages that other files of the repository have become: what a link names, and where it leads
# from a page at the top.
MOVED = (
    (r"(?:lessons|solutions)/(\d\d_\w+)\.ipynb", r"lessons/\1.ipynb"),
    (r"docs/sheets/?", "sheets.md"),
    (r"sheets/(\d\d\.svg)", r"docs/sheets/\1"),
    (r"waterfall\.png", "docs/waterfall.png"),
    (r"(?:docs/)?(ledger|measured|own_code)\.md", r"\1.md"),
    (r"(?:docs/)?teaching\.md", "teaching.md"),
    (r"(?:docs/)?(teaching/\d\d)\.md", r"\1.md"),
    (r"CONTRIBUTING\.md", "contributing.md"),
    (r"README\.md", "index.md"),
    (r"gradmem_lib/(\w+)/(\w+)\.py", r"#gradmem_lib.\1.\2"),
)


def relinked(text: str, up: str = "") -> str:
    """``text`` (Markdown) with links to files of the repository turned into links to the pages made
    of them.
    """
    for old, new in MOVED:
        text = re.sub(
            rf"\]\((?:\.\./)*{old}(#[\w-]+)?\)",
            lambda m, new=new: f"]({up}{m.expand(new)}{m[m.re.groups] or ''})",
            text,
        )
    return text


def lesson(notebook: dict, name: str, images: Path) -> dict:
    """A solution's notebook as a page: answers folded, pictures as files in ``images``, and a line
    on how to work in it.
    """
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cell["source"] = relinked(source, "../")
            continue
        if MARK.search(source) or "solution-only" in cell["metadata"].get("tags", []):
            cell["source"] = MARK.sub("", source)
            cell["metadata"] = {
                "tags": ["hide-input"],
                "mystnb": {
                    "code_prompt_show": "Show the answer",
                    "code_prompt_hide": "Hide the answer",
                },
            }
        for output in cell["outputs"]:
            _picture(output, images)
    where = (
        f"Work in it: <a href='../notebooks/{name}.ipynb' download>{name}.ipynb</a>, the "
        "notebook without answers."
    )
    first = notebook["cells"][0]
    title, rest = first["source"].split("\n", 1)
    first["source"] = (
        f"{title}\n\n<p class='work'>{where} Here every answer is folded, and outputs are stored "
        f"ones.</p>\n{rest}"
    )
    return notebook


def _picture(output: dict, images: Path) -> None:
    """A stored PNG becomes a file beside the pages, shown in its own size and with its words for
    who does not see it.
    """
    png = output.get("data", {}).get("image/png")
    if png is None:
        return
    raw = base64.b64decode("".join(png))
    file = images / f"{hashlib.sha256(raw).hexdigest()[:16]}.png"
    file.write_bytes(raw)
    about = output["metadata"].get("image/png", {})
    words = html.escape(about.get("alt", "".join(output["data"].get("text/plain", ""))), quote=True)
    size = "".join(f' {side}="{about[side]}"' for side in ("width", "height") if side in about)
    shown = f'<img src="../_static/{images.name}/{file.name}" alt="{words}"{size} loading="lazy"'
    # The picture has no background; without this class, the dark theme puts white behind it.
    shown += ' class="dark-light">'
    output["data"] = {"text/html": shown}


def floor_page(floor: str) -> str:
    """The reference of one folder of the library: every module's docstring, and those of its public
    names. Of the rooms inside the folder, it has the modules that give a public name.
    """
    import gradmem_lib

    files = (ROOT / "gradmem_lib" / floor).glob("[!_]*.py")
    modules = {f"{floor}.{file.stem}" for file in files}
    modules |= {home for home in gradmem_lib.HOMES.values() if home.startswith(f"{floor}.")}
    modules.discard("view.pictures")  # has nothing of its own
    lines = [floor, "=" * len(floor), ""]
    for module in sorted(modules):
        title = module.removeprefix(f"{floor}.")
        lines += [
            title,
            "-" * len(title),
            "",
            f".. automodule:: gradmem_lib.{module}",
            "   :members:",
            "   :exclude-members: set",  # matplotlib's, whose words name its own pages
            "",
        ]
    return "\n".join(lines)


def names_list() -> str:
    """The names that ``gradmem_lib`` itself gives, each with its home and the first sentence of its
    docstring.
    """
    import gradmem_lib

    found = []
    for name, home in sorted(gradmem_lib.HOMES.items()):
        words = " ".join(
            (getattr(gradmem_lib, name).__doc__ or "").split("\n\n")[0].split()
        ).replace("``", "`")
        if (
            name.isupper() or home.split(".")[0] not in FLOORS
        ):  # a table, which has no words of its own, or no page
            found.append(f"- `{name}`" + ("" if name.isupper() else f": {words}"))
        else:
            found.append(f"- [`{name}`](#gradmem_lib.{home}.{name}): {words}")
    return "\n".join(found)


def sheets() -> str:
    """The sheets for the wall, small; each leads to the file to print."""
    files = sorted((ROOT / "docs" / "sheets").glob("*.svg"))
    shown = (
        (
            f'<a href="sheets/{file.name}"><img src="sheets/{file.name}" alt="The sheet of lesson '
            f'{file.stem}" loading="lazy"></a>'
        )
        for file in files
    )
    return "\n".join(["<div class='sheets'>", *shown, "</div>"])


def ledger(page: str) -> str:
    """docs/ledger.md with the place above its table into which the page's script puts search and
    filters.
    """
    return page.replace("\n| Claim |", '\n<div id="ledger-filter" hidden></div>\n\n| Claim |', 1)


def gather() -> None:
    """Write all sources: pages into build/site/source, what they show into static, notebooks to
    download into extra.
    """
    shutil.rmtree(BUILD, ignore_errors=True)
    source, images = BUILD / "source", BUILD / "static" / "outputs"
    shutil.copytree(HERE / "pages", source)
    shutil.copytree(HERE / "static", images.parent)
    images.mkdir()
    # Its pages become pages of the site; the rest is what pages show.
    shutil.copytree(ROOT / "docs", source / "docs", ignore=shutil.ignore_patterns("*.md"))
    shutil.copy(ROOT / "LICENSE", source)
    _, first, rest = relinked(_read("README.md")).split("\n\n", 2)
    _insert(source / "index.md", rest)
    _insert(source / "index.md", first, "FIRST")
    _insert(source / "contributing.md", relinked(_read("CONTRIBUTING.md")))
    _insert(source / "ledger.md", relinked(ledger(_read("docs/ledger.md"))))
    for name in ("teaching", "measured", "own_code"):
        _insert(source / f"{name}.md", relinked(_read(f"docs/{name}.md")))
    (source / "teaching").mkdir()
    for path in sorted((ROOT / "docs" / "teaching").glob("*.md")):
        page = relinked(path.read_text(encoding="utf-8"), "../")
        (source / "teaching" / path.name).write_text(page, encoding="utf-8")
    _insert(source / "sheets.md", sheets())
    (source / "lessons").mkdir()
    for path in sorted((ROOT / "solutions").glob("*.ipynb")):
        page = lesson(json.loads(path.read_text(encoding="utf-8")), path.stem, images)
        (source / "lessons" / path.name).write_text(json.dumps(page), encoding="utf-8")
    shutil.copytree(
        ROOT / "lessons", BUILD / "extra" / "notebooks", ignore=shutil.ignore_patterns(".*")
    )
    shutil.copytree(ROOT / "docs" / "sheets", BUILD / "extra" / "sheets")
    run_to_explore(Path(shutil.copy(HERE / "run.html", BUILD / "extra")))
    for floor in FLOORS:
        (source / "reference" / f"{floor}.rst").write_text(floor_page(floor), encoding="utf-8")
    _insert(source / "reference" / "index.md", names_list())
    (images.parent / "fits-data.js").write_text(fits_data(FITS), encoding="utf-8")


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _insert(page: Path, text: str, where: str = "INSERT") -> None:
    """Put ``text`` where the page says so."""
    page.write_text(page.read_text(encoding="utf-8").replace(where, text), encoding="utf-8")


def run_to_explore(page: Path) -> None:
    """Give the stored page of a run the picture's script and style, as they are today."""
    from gradmem_lib.view.live import drawing, looks

    _insert(page, drawing("page"), "THE SCRIPT")
    _insert(page, looks(), "THE STYLE")


def fits_data(path: Path) -> str:
    """What the page "what fits my card" shows, as a script, since a page opened from a folder may
    read no other file.
    """
    from gradmem_lib.view.style import COLORS
    from gradmem_lib.view.svg import svg_pattern

    found = json.loads(path.read_text(encoding="utf-8"))
    patterns = {name: svg_pattern("fits-", name) for name in COLORS}
    return f"const FITS = {json.dumps(found)};\nconst PATTERNS = {json.dumps(patterns)};\n"


def main() -> int:
    sys.path.insert(0, str(ROOT))
    import conf  # noqa: F401  (finds the library's packages)
    from links import problems
    from sphinx.cmd.build import main as sphinx

    gather()
    html = BUILD / "html"
    failed = sphinx(
        [
            "-c",
            str(HERE),
            "-W",
            "--keep-going",
            "-q",
            "-d",
            str(BUILD / "doctrees"),
            str(BUILD / "source"),
            str(html),
        ]
    )
    # For who changes the theme's scripts and styles: 3.5 MB that no page shows.
    for source_map in html.rglob("*.map"):
        source_map.unlink()
    found = problems(html)
    print(
        "\n".join(found)
        or f"No link is broken, and nothing is loaded from elsewhere. The site is in {html}"
    )
    return int(bool(failed or found))


if __name__ == "__main__":
    sys.exit(main())
