"""What can be held of the site without building it; `make site` builds it, and looks at it in a
browser.
"""

import base64
import importlib.util
import re
import shutil
from pathlib import Path

from notebooks.browser import assert_explored, chromium
from repository.test_floors import FLOORS
from repository.test_setup import lines
from support.paths import ROOT

from gradmem_lib.course.ledger.table import DOCUMENTS

SITE = ROOT / "site"
PNG = base64.b64encode(b"a picture").decode()


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, links = load("build"), load("links")


def cell(kind: str, source: str, **more) -> dict:
    outputs = {"outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "source": source, "metadata": {}, **outputs, **more}


def test_a_lesson_folds_its_answers_and_says_where_its_notebook_is(tmp_path):
    answer = (
        "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n\n\nf = "
        "check('1.1', f)"
    )
    cells = [
        cell("markdown", "# 01 · One\n\n*9 minutes*"),
        cell("code", answer),
        cell("code", "x = 2  # SOLUTION"),
    ]
    page = build.lesson({"cells": [*cells, cell("code", "print(1)")]}, "01_one", tmp_path)["cells"]
    assert (
        page[0]["source"].startswith("# 01 · One\n")
        and "../notebooks/01_one.ipynb" in page[0]["source"]
    )
    assert [code["source"] for code in page[1:]] == [
        "def f():\n    return 1\n\n\nf = check('1.1', f)",
        "x = 2",
        "print(1)",
    ]
    assert [code["metadata"].get("tags") for code in page[1:]] == [
        ["hide-input"],
        ["hide-input"],
        None,
    ]


def test_a_picture_becomes_a_file_with_its_size_and_its_words(tmp_path):
    about = {"image/png": {"alt": 'one "peak" <high>', "width": 780, "height": 320}}
    picture = {
        "output_type": "display_data",
        "data": {"image/png": PNG, "text/plain": "Plot"},
        "metadata": about,
    }
    page = build.lesson(
        {"cells": [cell("markdown", "# T\n"), cell("code", "show()", outputs=[picture])]},
        "x",
        tmp_path,
    )
    shown = page["cells"][1]["outputs"][0]["data"]["text/html"]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"a picture"]
    assert 'alt="one &quot;peak&quot; &lt;high&gt;" width="780" height="320"' in shown


def test_every_link_of_a_page_from_elsewhere_leads_to_a_page_or_a_file():
    there = {path.name for path in (SITE / "pages").glob("*.md")} | {"LICENSE"}
    there |= {f"lessons/{path.stem}.ipynb" for path in (ROOT / "solutions").glob("*.py")}
    there |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*")}
    there |= {f"teaching/{path.name}" for path in (ROOT / "docs" / "teaching").iterdir()}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    nowhere = []
    for path in (*pages, ROOT / "docs" / "teaching" / "06.md"):
        _, _, below_title = path.read_text(encoding="utf-8").partition("\n\n")
        text = build.relinked(below_title)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith(("#", "http")) and target.split("#")[0] not in there:
                nowhere.append(f"{path.name}: {target}")
    assert not nowhere


def test_links_between_the_repositorys_files_become_links_between_pages():
    assert build.relinked(
        "[a](docs/ledger.md#c13) [b](../lessons/01_x.ipynb) [c](https://d.org/ledger.md)", "../"
    ) == ("[a](../ledger.md#c13) [b](../lessons/01_x.ipynb) [c](https://d.org/ledger.md)")
    assert (
        build.relinked("[t](gradmem_lib/measure/tracker.py)") == "[t](#gradmem_lib.measure.tracker)"
    )


def test_the_checker_names_what_leads_nowhere_and_what_comes_from_a_network(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there">1</a><a href="#here">2</a><a href="c.html">3</a>'
    )
    (tmp_path / "b.html").write_text(
        '<script src="https://cdn.org/x.js"></script><img src="no.png"><a href="a.html#here">'
    )
    assert links.problems(tmp_path) == [
        "a.html: b.html#there names no place on that page",
        "a.html: c.html leads nowhere",
        "b.html: loads https://cdn.org/x.js",
        "b.html: no.png leads nowhere",
    ]
    (tmp_path / "a.html").write_text("")
    (tmp_path / "b.html").write_text('<a href="https://arxiv.org/abs/1910.02054">another site</a>')
    (tmp_path / "s.css").write_text("@import 'https://fonts.org/f.css';")
    assert links.problems(tmp_path) == ["s.css: loads something from a network"]
    (tmp_path / "s.css").write_text("p { background: url(data:image/png;base64,AA) }")
    assert links.problems(tmp_path) == []
    monkeypatch.setattr(links, "MOST", 50)
    assert links.problems(tmp_path) == ["the site takes 106 bytes, of 50 that it may take"]


def test_no_script_style_or_page_of_ours_names_another_site():
    for path in [*(SITE / "static").iterdir(), *(SITE / "pages").rglob("*.md")]:
        assert not re.search(r"https?:|src=.//", path.read_text(encoding="utf-8")), path


def test_the_ledger_has_the_form_that_its_script_reads():
    page = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(C\d\d)\]\(#c\d\d\) \|", page, re.M)
    last = re.findall(
        r"^(.+)\. Shown (?:in lesson \d\d.*|here alone: lesson \d\d is about it)\.\n\n</details>$",
        page,
        re.M,
    )
    assert len(rows) == len(last) > 50 and set("; ".join(last).split("; ")) == set(
        DOCUMENTS.values()
    )
    assert build.ledger(page).count('<div id="ledger-filter" hidden></div>\n\n| Claim |') == 1


def test_the_reference_has_every_floor_and_the_requirements_are_pinned():
    folders = {floor for floor in FLOORS if (ROOT / "gradmem_lib" / floor).is_dir()}
    for_the_library_alone = {"compat"}  # torch's private names: nobody else is to use them
    assert set(build.FLOORS) == folders - for_the_library_alone
    listed = (
        (SITE / "pages" / "reference" / "index.md")
        .read_text(encoding="utf-8")
        .split("{toctree}")[1]
    )
    assert re.findall(r"^\w+$", listed, re.M) == list(build.FLOORS)
    assert ".. automodule:: gradmem_lib.measure.tracker\n" in build.floor_page("measure")
    assert all(re.fullmatch(r"[\w-]+==\d[\w.]*", line) for line in lines("requirements-site.txt"))


def test_the_stored_run_is_explored_with_the_script_of_today(tmp_path):
    path = Path(shutil.copy(SITE / "run.html", tmp_path))
    assert "function render(" not in path.read_text(encoding="utf-8")
    build.run_to_explore(path)
    with chromium() as browser:
        page = browser.new_page()
        page.goto(path.as_uri())
        assert_explored(page, page.locator(".gm-live"))
