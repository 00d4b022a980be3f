"""The picture that lessons 00 to 05 open with: its bytes are those that the lessons printed."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

import build_notebooks as builder
import nbformat
import opening_picture
import pytest
from support.paths import ROOT

SOLUTIONS = ROOT / "solutions"
CALLS = re.compile(r"^first_run\(", re.MULTILINE)
STORY = [path for path in sorted(SOLUTIONS.glob("*.py")) if CALLS.search(path.read_text("utf-8"))]


def printed_peak(path) -> str:
    """The highest of the phases that the last run of the main path printed."""
    notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=nbformat.NO_CONVERT)
    cell, *_ = [cell for cell in notebook.cells if CALLS.search(cell.source)]
    lines = [line for line in cell.outputs[0].text.splitlines() if line.startswith("forward")]
    return max(re.findall(r"([\d.]+) MiB, ", lines[-1]), key=float)


def parts(image: str) -> tuple[str, ElementTree.Element]:
    """The words of an ``<img>``, and its picture."""
    words, source = re.fullmatch(
        r'<img width="\d+" alt="([^"]+)" src="[^,]+,(.+)">', image
    ).groups()
    return words, ElementTree.fromstring(base64.b64decode(source))


@pytest.mark.parametrize("path", STORY, ids=lambda path: path.name[:2])
def test_a_lesson_that_makes_the_run_opens_with_its_picture(path):
    first = builder.read_source(path).cells[0].source
    assert builder.PICTURE in first
    lesson = nbformat.read(ROOT / "lessons" / f"{path.stem}.ipynb", nbformat.NO_CONVERT)
    (image,) = [line for line in lesson.cells[1].source.splitlines() if line.startswith("<img ")]
    words, picture = parts(image)
    assert words.endswith(f"The card has 48. This is lesson {path.name[:2]}.")
    drawn = list(picture.iter("{http://www.w3.org/2000/svg}text"))
    texts = [element.text for element in drawn]
    for other in STORY:
        peak = printed_peak(other)
        assert re.search(rf"\b{other.name[:2]} [^,]+ {re.escape(peak)}[,.]", words)
        assert float(peak) in [bar.peak for bar in opening_picture.bars(SOLUTIONS)]
        assert peak in texts
    name, peak = [element.text for element in drawn if element.get("font-weight")]
    assert name.startswith(path.name[:2])
    assert peak == printed_peak(path)


def test_only_the_lessons_of_this_story_have_the_picture():
    assert [path.name[:2] for path in STORY] == ["00", "01", "02", "03", "04", "05"]
    for path in SOLUTIONS.glob("*.py"):
        assert (builder.PICTURE in path.read_text("utf-8")) == (path in STORY)


def test_bars_are_as_long_as_their_bytes():
    drawn = opening_picture.bars(SOLUTIONS)
    picture = ElementTree.fromstring(opening_picture.svg(drawn, "03"))
    boxes = [
        element
        for element in picture.iter("{http://www.w3.org/2000/svg}rect")
        if element.get("x") == str(opening_picture.LEFT)
    ]
    lengths = [float(box.get("width")) for box in boxes]
    for bar, length in zip(drawn, lengths, strict=True):
        assert length / lengths[0] == pytest.approx(bar.peak / drawn[0].peak, abs=0.003)
    paths = picture.iter("{http://www.w3.org/2000/svg}path")
    (card,) = [path.get("d") for path in paths if path.get("stroke-dasharray")]
    at = float(re.match(r"M([\d.]+) ", card)[1]) - opening_picture.LEFT
    assert at / lengths[0] == pytest.approx(drawn[0].card / drawn[0].peak, abs=0.003)
