"""``python -m gradmem_lib class``: a board from files of every kind, with nobody's words run as
HTML.
"""

import json
import os
import random
import re
import shutil
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradmem_lib.__main__ import main
from gradmem_lib.course.catalogue import all_exercises
from gradmem_lib.course.teacher import class_board
from gradmem_lib.course.teacher.class_board import PLACES, Board

TAGS = """
    html head meta title style body h1 h2 h3 p a b div ul li section
    table thead tbody tr th td svg desc defs rect path text g use clippath
"""
WITHIN = set(TAGS.split())


class Parsed(HTMLParser):
    """The elements of a page, their attributes, and the rows of its tables."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.rows, self.text = [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def learner(passed=(), tried=(), **guesses) -> str:
    checks = {id: {"outcome": "passed", "tries": 2} for id in passed}
    checks |= {id: {"outcome": "not yet", "tries": 4} for id in tried}
    guesses = {
        f"{id[1]}.{id[2]}": dict(zip(("guess", "measured", "unit"), g, strict=True))
        for id, g in guesses.items()
    }
    return json.dumps({"version": 1, "checks": checks, "guesses": guesses})


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "class"
    path.mkdir()
    return path


@pytest.fixture
def seen(folder, tmp_path, capsys):
    def look(*words) -> Parsed:
        out = tmp_path / "board.html"
        assert main(["class", str(folder), "--once", "--out", str(out), *words]) == 0, (
            capsys.readouterr().err
        )
        assert sorted(path.name for path in tmp_path.iterdir() if "board" in path.name) == [
            "board.html"
        ]
        return Parsed(out)

    return look


def test_thirty_learners(folder, seen):
    ids, chance = [exercise.id for exercise in all_exercises()], random.Random(1)
    for i in range(30):
        done = chance.randrange(3, 20)
        guess = (10 ** chance.uniform(4, 9), 1_610_612_736 if i % 2 else None, "bytes")
        (folder / f"name{i}.json").write_text(
            learner(ids[:done], ["4.7"] if i < 11 else ["4.1"] * (i < 15), _1a=guess)
        )
    page = seen()
    assert "30 learners" in page.text and "name" not in page.text.lower().replace("names", "")
    assert sorted(row[0] for row in page.rows[1:31]) == sorted(f"learner {i}" for i in range(1, 31))
    assert (
        "4.7" in page.text.partition("What holds people")[2][:40]
        and "11 of 30 learners have tried it" in page.text
    )
    assert "Median of 30 guesses" in page.text and "Measured: 1.50 GiB" in page.text
    counts = re.findall(
        r">(\d+)</text>", (folder.parent / "board.html").read_text().partition("<svg")[2]
    )
    assert sum(map(int, counts)) == 30
    assert "MiB" in page.text  # a logarithmic axis from KB to GB
    page = seen("--names")
    assert [row[0] for row in page.rows[1:31]] == sorted(f"name{i}" for i in range(30))


def test_who_is_where(folder, seen):
    (folder / "a.json").write_text(learner(["0.1", "1.1", "5.8", "9.99"], _3a=(5, None, "percent")))
    page = seen()
    of = {lesson: len(all_exercises(lesson)) for lesson in page.rows[0][1:]}
    row = dict(zip(page.rows[0], page.rows[1], strict=True))
    assert (
        row["00"] == f"1/{of['00']}"
        and row["03"] == f"0/{of['03']}"
        and row["02"] == "" == row["09"].removeprefix(f"0/{of['09']}")
    )
    assert row["06"] == f"1/{of['06']}"  # 5.8 has moved there
    assert page.attributes.count(("class", "n here")) == 1  # the frame of the last lesson
    assert "Nobody has shown the measured value yet" in page.text and "measured 5" not in page.text
    assert "Nobody has tried" in page.text


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_homes_of_a_hub_and_files_of_any_name(folder, seen, place):
    file = folder / "anna" / place
    file.parent.mkdir(parents=True)
    file.write_text(learner(["0.1"]))
    (folder / "anna" / "notes.json").write_text("{}")
    (folder / "bert").mkdir()
    (folder / "bert" / "Abgabe (2).txt").write_text(learner(["0.1"]))
    (folder / "bert" / "essay.txt").write_text("not progress")
    (folder / "carl").mkdir()
    os.symlink(file, folder / "dora")
    page = seen("--names")
    assert [row[0] for row in page.rows[1:4]] == ["anna", "bert/Abgabe (2).txt", "dora"]
    assert "carl: no progress file in it yet" in page.text
    assert (
        "notes" not in page.text
        and "essay" not in page.text
        and "files to look" in page.text.lower()
    )


def test_broken_and_foreign_files_are_listed(folder, seen, capsys):
    good = learner(["0.1"])
    for name, content in {
        "cut": good[:-9],
        "empty": "",
        "deep": "[" * 10**5,
        "foreign": '{"version": 1}',
        "other": '{"version": 2}',
        "binary": "\0\xff",
        "whole": good,
        "part": good.replace('"checks": {', '"checks": {"1.1": 7, '),
        "whole.json.bak": good,
        "whole.json.corrupt-1": good,
        "whole.json.lock": "",
        ".whole.json-x": good,
    }.items():
        (folder / name).write_text(content, encoding="latin-1")
    os.mkfifo(folder / "pipe")
    os.symlink("nowhere", folder / "link")
    listed = seen("--names")
    assert [row[0] for row in listed.rows[1:3]] == ["part", "whole"]
    broken = ("binary", "cut", "deep", "empty", "foreign", "other")
    for name in broken:
        assert f"{name}: not a progress file, or only a part of one" in listed.text
    assert capsys.readouterr().err.count("not a progress file") == len(broken)
    assert "file 6: " in seen().text and "whole" not in seen().text


@pytest.fixture
def public(monkeypatch):
    """A folder that other accounts may enter, and a switch to one of them where tests run as
    root.
    """
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    if root:
        os.seteuid(65534)
    yield path
    if root:
        os.seteuid(0)
    for place in path.rglob("*"):
        place.chmod(0o777)
    shutil.rmtree(path)


def put(home, mode=0o644):
    file = home / PLACES[0]
    file.parent.mkdir(parents=True)
    file.write_text(learner(passed=("1.1",)))
    file.chmod(mode)
    return file


@pytest.mark.skipif(os.name == "nt", reason="there, modes say little")
def test_files_of_other_accounts_that_may_not_be_read_are_said(public, capsys):
    folder, out = public / "class", public / "board.html"
    folder.mkdir()
    put(folder / "open")
    put(folder / "closed-file", 0o000)
    put(folder / "closed-inside")
    (folder / "closed-inside" / ".local").chmod(0o000)
    put(folder / "closed-home")
    (folder / "closed-home").chmod(0o000)
    board = Board(folder, out)
    board.write(0)
    assert len(board.learners) == 1
    closed = {path.relative_to(folder).parts[0]: remark for path, remark in board.remarks.items()}
    assert set(closed) == {"closed-file", "closed-inside", "closed-home"}
    for remark in closed.values():
        assert "chmod o+r on it, and chmod o+x on each folder" in remark
    text = out.read_text()
    assert text.count("this account may not") == 3 and "closed-" not in text
    assert "no progress file in it yet" not in text
    assert main(["class", str(folder), "--once", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert said.count("this account may not") == 3
    assert f"{folder / 'closed-file' / PLACES[0]}: this account may not read" in said
    # What the sentences advise.
    (folder / "closed-file" / PLACES[0]).chmod(0o404)  # tests own these files
    (folder / "closed-inside" / ".local").chmod(0o711)
    (folder / "closed-home").chmod(0o755)
    board.write(0)
    assert len(board.learners) == 4 and not board.remarks


def test_values_that_cannot_be_drawn_are_counted(folder, seen):
    odd = (float("nan"), float("inf"), 10**400, True, 1e300, -1e-200)
    for i, value in enumerate(odd):
        (folder / f"{i}").write_text(learner(["0.1"], _1a=(value, value, "bytes")))
    (folder / "x").write_text(
        learner(_1b=(0, 0, "bytes"), _1c=(-5, 1e9, ""), _1d=(7, 7, "%"), _1e=(1e30, 1e-30, ""))
    )
    (folder / "y").write_text(learner(_1d=(1, 2, "%"), _1c=(8, None, "")))
    (folder / "z").write_text(learner(_1d=(900, None, "bytes")))
    page = seen()
    assert page.tags.count("svg") == 4 and "1.a" not in page.text
    assert (
        "In another unit, left out: 1." in page.text and "Machines differ (2 % to 7 %)" in page.text
    )
    assert "Beyond the picture: 1." in page.text


def test_no_words_of_a_learner_become_html(folder, seen):
    evil = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>\ud800"
    name = evil.replace("/", "").replace("\ud800", "")
    (folder / name).write_text(learner([evil], _1a=(3, 4, evil[:24]), _1b=(3, 4, "<b onclick=x>")))
    (folder / f"broken{name}").write_text(evil, encoding="utf-8", errors="replace")
    (folder / os.fsdecode(b"\xff<i>")).write_text(learner())
    page = seen("--names")
    assert set(page.tags) <= WITHIN and page.tags.count("svg") == 2, set(page.tags) - WITHIN
    assert not [
        key
        for key, value in page.attributes
        if key.startswith("on") or "script" in (value or "").replace("desc", "")
    ]
    assert (
        "<script>" in page.text
        and ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    )


def test_measured_values_wait_for_a_click(folder):
    (folder / "anna").write_text(
        learner(_1a=(3e8, 117_739_676, "bytes"), _1b=(2e9, None, "bytes"), _9z=(1, 2, ""))
    )
    out = folder / "the class.html"  # in the folder that is read
    for _ in range(2):
        assert main(["class", str(folder), "--once", "--hide", "--out", str(out)]) == 0
    page, links = Parsed(out), ["the%20class-measured/1.a.html", "the%20class-measured/9.z.html"]
    question = "Parameters, gradients and optimizer states, together: how many bytes?"
    assert page.text.count(question) == 1
    hrefs = [value for key, value in page.attributes if key == "href"]
    assert [value for value in hrefs if not value.startswith("#")] == links  # others: of a picture
    assert (
        "112.29 MiB" not in page.text
        and "Measured" not in page.text
        and "Files to look" not in page.text
    )
    assert sorted(path.name for path in (folder / "the class-measured").iterdir()) == [
        "1.a.html",
        "9.z.html",
    ]
    shown = Parsed(folder / "the class-measured" / "1.a.html")
    assert "Measured: 112.29 MiB" in shown.text and "how many bytes?" in shown.text
    assert ("href", "../the%20class.html") in shown.attributes and set(shown.tags) <= WITHIN
    main(["class", str(folder), "--once", "--out", str(out)])  # beside what the last board has left
    assert "Measured: 112.29 MiB" in Parsed(out).text and "Files to look" not in Parsed(out).text
    main(["class", str(folder), "--once", "--out", str(folder.parent / "board.html")])
    assert "Measured: 112.29 MiB" in Parsed(folder.parent / "board.html").text


def test_ctrl_c_in_the_first_round_leaves_quietly(folder, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(class_board.os, "replace", interrupted)
    assert main(["class", str(folder), "--out", str(folder.parent / "board.html")]) == 130
    assert [path.name for path in folder.parent.iterdir()] == [
        "class"
    ] and not capsys.readouterr().err


def test_an_empty_folder_and_a_missing_one(folder, seen, capsys):
    assert "0 learners" in seen().text and "no progress file in this folder yet" in seen().text
    capsys.readouterr()
    assert main(["class", str(folder / "missing"), "--once", "--out", str(folder / "b.html")]) == 2
    assert "missing" in capsys.readouterr().err and not list(folder.iterdir())
    theirs = folder / "anna.json"
    theirs.write_text(before := learner(["0.1"]))
    assert main(["class", str(folder), "--once", "--out", str(theirs)]) == 2
    assert "--out" in capsys.readouterr().err and theirs.read_text() == before


def test_the_next_round_reads_what_was_being_written(folder):
    out, file = folder / "board.html", folder / "anna.json"
    made = Board(folder, out)
    file.write_text("{")
    made.write(5)
    assert "0 learners" in out.read_text() and "file 1: not a progress file" in out.read_text()
    file.write_text(learner(["0.1"]))
    made.write(5)
    assert "1 learner," in out.read_text() and "to look at" not in out.read_text()
    file.write_text("{")
    made.write(5)
    assert "1 learner," in out.read_text() and "shown as it was before" in out.read_text()
    for i in range(5):
        (folder / f"a{i}").write_text(learner(["1.1"]))
    made.write(5)
    assert [made.label(path) for path in made.learners] == [f"learner {i}" for i in range(1, 7)]
    assert next(iter(made.learners)) == file  # a number stays with its learner


def test_it_goes_on_until_ctrl_c_and_through_a_failure(folder, capsys, monkeypatch):
    out, rounds = folder.parent / "board.html", []

    def wait(seconds):
        rounds.append('http-equiv="refresh" content="5"' in out.read_text())
        if len(rounds) == 1:
            folder.rename(folder.parent / "away")
        elif len(rounds) == 2:
            (folder.parent / "away").rename(folder)
        elif len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(class_board.time, "sleep", wait)
    assert main(["class", str(folder), "--out", str(out)]) == 0
    assert rounds == [True] * 3 and 'http-equiv="refresh"' not in out.read_text()
    assert "not updated any more" in out.read_text() and "No such file" in capsys.readouterr().err
